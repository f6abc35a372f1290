"""The jail: namespaces of ours around a program with isolation of its own, such as gVisor or an emulator."""

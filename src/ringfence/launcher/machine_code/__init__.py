"""Programs of machine code: process images, hibernation of idle PID 1s, vfork. x86-64 only."""

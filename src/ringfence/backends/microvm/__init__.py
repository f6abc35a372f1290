"""Virtual machines of an emulator's, each in a jail, continued from one that has booted before."""

"""Virtual machines of an emulator's, each in a hull, continued from one that has booted before."""

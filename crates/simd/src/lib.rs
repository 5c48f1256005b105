//! Vector micro-kernels that the CPU plugins share

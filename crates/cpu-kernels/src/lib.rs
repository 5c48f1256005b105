//! CPU attention kernels that the CPU plugins share: instruction sets, micro-kernels, tile driver

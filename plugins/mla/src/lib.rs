//! CPU_MLA: multi-head latent attention on the CPU

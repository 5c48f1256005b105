//! `CPU_MLA` as an engine has it: its answers, its invariants, its refusals.

mod common;
mod forms;
mod suite;

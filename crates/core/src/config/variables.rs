//! The environment variables that Attaché knows.

/// An environment variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
}

const fn variable(name: &'static str, help: &'static str) -> Variable {
    Variable { name, help }
}

/// The variables of this program; an unknown one that starts with `ATTACHE_` is an error.
pub const VARIABLES: &[Variable] = &[
    variable("ATTACHE_CONFIG", "configuration file, instead of the default ones"),
    variable("ATTACHE_BACKEND", "backend for every layer, or auto"),
    variable("ATTACHE_BACKEND_PER_KIND", "KIND=NAME, several separated by commas"),
    variable("ATTACHE_ON_INVALID_OVERRIDE", "what an override that cannot be obeyed does: error or fallback"),
    variable("ATTACHE_REQUIRE", "backends or plugins of which one must be taken, separated by commas"),
    variable("ATTACHE_PREFER", "backends or plugins that are taken where they are valid, separated by commas"),
    variable("ATTACHE_DENY", "backends or plugins that are never taken, separated by commas"),
    variable("ATTACHE_VERSIONS", "NAME=REQUIREMENT, several separated by semicolons"),
    variable("ATTACHE_PLUGINS", "manifests or libraries of plugins, separated by colons"),
    variable("ATTACHE_PLUGIN_PATH", "directories of plugins, separated by colons"),
    variable("ATTACHE_TRUST", "which plugins may be opened: owned or any"),
    variable("ATTACHE_LOG", "what is logged to stderr, for instance info or attache_core=debug"),
    variable("ATTACHE_CPU_ISA", "instruction set of the CPU plugins: amx, avx512, avx2 or portable"),
];

/// Variables whose values are paths: not taken from the environment of an elevated process.
pub(super) const PATHS: [&str; 3] = ["ATTACHE_CONFIG", "ATTACHE_PLUGINS", "ATTACHE_PLUGIN_PATH"];

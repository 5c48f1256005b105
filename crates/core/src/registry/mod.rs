//! One registry over linked-in plugins and libraries.

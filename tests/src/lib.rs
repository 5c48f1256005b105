//! Workspace tests: real libraries, end to end

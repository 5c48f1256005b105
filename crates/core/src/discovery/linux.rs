//! What only Linux says: system directories, and whether the process has more rights than its user.

/// Directories of plugins for all users.
pub(super) const SYSTEM_DIRECTORIES: [&str; 2] = ["/usr/local/lib/attache/plugins", "/usr/lib/attache/plugins"];

/// The kernel's entry that says so, see getauxval(3).
const AT_SECURE: usize = 23;

/// Whether the process was started with more rights than its user has (set-user-ID, set-group-ID or
/// file capabilities). When that cannot be found out, yes.
pub(crate) fn is_elevated() -> bool {
    std::fs::read("/proc/self/auxv").map_or(true, |auxv| secure(&auxv).unwrap_or(true))
}

fn secure(auxv: &[u8]) -> Option<bool> {
    const WORD: usize = size_of::<usize>();
    let (words, _) = auxv.as_chunks::<WORD>();
    let (pairs, _) = words.as_chunks::<2>();
    pairs
        .iter()
        .map(|[key, value]| (usize::from_ne_bytes(*key), usize::from_ne_bytes(*value)))
        .find(|(key, _)| *key == AT_SECURE)
        .map(|(_, value)| value != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_word_is_read() {
        let auxv = |pairs: &[(usize, usize)]| -> Vec<u8> {
            pairs.iter().flat_map(|(key, value)| [key.to_ne_bytes(), value.to_ne_bytes()].concat()).collect()
        };
        assert_eq!(secure(&auxv(&[(6, 4096), (AT_SECURE, 0), (0, 0)])), Some(false));
        assert_eq!(secure(&auxv(&[(AT_SECURE, 1)])), Some(true));
        assert_eq!(secure(&auxv(&[(6, 1)])), None);
        assert!(!is_elevated(), "tests run as their user");
    }
}

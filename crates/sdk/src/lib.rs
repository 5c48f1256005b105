//! What a plugin author uses: safe traits and one export macro

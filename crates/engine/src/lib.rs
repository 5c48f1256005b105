//! A small, real inference engine on Attaché

//! placeholder, replaced with the crate's own account

//! Where do the keys and values of a block lie in memory?

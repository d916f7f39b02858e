//! Which tokens may come next, when a grammar says so?

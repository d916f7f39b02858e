//! The threads that compute one forward pass.

//! The operations a forward pass is made of, in two implementations.

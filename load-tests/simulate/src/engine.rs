//! How would a node spend its time? A model of one, on a clock that its caller moves.

/// One modelled node.
#[derive(Debug)]
pub struct Node {}

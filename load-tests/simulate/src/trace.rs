//! Who asked what when? A trace in memory.

/// A trace.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Trace {}

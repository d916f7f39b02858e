//! What would the index answer if it were slow and obvious?

//! Copies to and from write-combined memory.

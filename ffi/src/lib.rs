//! The C interface of `gdrcopy`. It has no exports yet.

#[doc(no_inline)]
pub use gdrcopy;

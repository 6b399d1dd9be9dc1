//! Numbers that the environment sets.

use std::str::FromStr;

/// The variable's value; `otherwise` where it is not set.
pub(crate) fn from_env<T: FromStr>(name: &str, otherwise: T) -> T {
    match std::env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name} is '{value}', not a number")),
        Err(_) => otherwise,
    }
}

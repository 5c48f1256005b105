//! Metadata of a GGUF file by key, with the type that the reader expects.

use crate::error::GgufError;
use candle_core::quantized::gguf_file::Value;
use std::collections::HashMap;

/// What a file says about itself.
#[derive(Debug, Default)]
pub struct Metadata {
    values: HashMap<String, Value>,
}

/// A value as text, shortened: arrays of a vocabulary have hundreds of thousands of items.
fn shorten(value: &Value) -> String {
    let text = match value {
        Value::Array(items) => format!("an array of {} items", items.len()),
        Value::String(text) => format!("'{text}'"),
        other => format!("{other:?}"),
    };
    if text.chars().count() <= 80 { text } else { text.chars().take(77).chain("...".chars()).collect() }
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::U8(v) => Some(i64::from(*v)),
        Value::I8(v) => Some(i64::from(*v)),
        Value::U16(v) => Some(i64::from(*v)),
        Value::I16(v) => Some(i64::from(*v)),
        Value::U32(v) => Some(i64::from(*v)),
        Value::I32(v) => Some(i64::from(*v)),
        Value::I64(v) => Some(*v),
        Value::U64(v) => i64::try_from(*v).ok(),
        _ => None,
    }
}

fn unsigned(value: &Value) -> Option<u32> {
    integer(value).and_then(|value| u32::try_from(value).ok())
}

impl Metadata {
    /// Metadata of a file.
    #[must_use]
    pub fn new(values: HashMap<String, Value>) -> Self {
        Self { values }
    }

    /// Whether a key is present.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    fn required(&self, key: &str) -> Result<&Value, GgufError> {
        self.values.get(key).ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, GgufError> {
        let value = self.required(key)?;
        convert(value).ok_or_else(|| bad(key, value, expected))
    }

    /// An error about a key's value.
    #[must_use]
    pub fn bad_value(&self, key: &str, expected: &str) -> GgufError {
        self.values
            .get(key)
            .map_or_else(|| GgufError::MissingKey { key: key.to_owned() }, |value| bad(key, value, expected))
    }

    /// A text.
    ///
    /// # Errors
    /// When it is missing or no text.
    pub fn string(&self, key: &str) -> Result<&str, GgufError> {
        self.read(key, "a text", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A number from 0.
    ///
    /// # Errors
    /// When it is missing, no whole number or out of range.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.read(key, "a whole number from 0 to 4294967295", unsigned)
    }

    /// A number from 1.
    ///
    /// # Errors
    /// As [`Metadata::u32`], and for 0.
    pub fn positive(&self, key: &str) -> Result<u32, GgufError> {
        self.read(key, "a whole number above 0", |value| unsigned(value).filter(|value| *value > 0))
    }

    /// A number.
    ///
    /// # Errors
    /// When it is missing or not a finite number.
    pub fn float(&self, key: &str) -> Result<f64, GgufError> {
        self.read(key, "a finite number", |value| {
            let number = match value {
                Value::F32(v) => f64::from(*v),
                Value::F64(v) => *v,
                other => integer(other)? as f64,
            };
            number.is_finite().then_some(number)
        })
    }

    /// A number above 0.
    ///
    /// # Errors
    /// As [`Metadata::float`], and for others.
    pub fn positive_float(&self, key: &str) -> Result<f64, GgufError> {
        let value = self.float(key)?;
        if value > 0.0 { Ok(value) } else { Err(self.bad_value(key, "a finite number above 0")) }
    }

    /// A truth value, or `default` where the key is missing.
    ///
    /// # Errors
    /// When it is something else.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, GgufError> {
        if !self.has(key) {
            return Ok(default);
        }
        self.read(key, "true or false", |value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// `count` numbers from 1: one for all, or an array with one each.
    ///
    /// # Errors
    /// When it is missing, has another length, or holds something else.
    pub fn positive_for_each(&self, key: &str, count: usize) -> Result<Vec<u32>, GgufError> {
        let expected = format!("a whole number above 0, or an array of {count} of them");
        self.read(key, &expected, |value| {
            let number = |value: &Value| unsigned(value).filter(|value| *value > 0);
            match value {
                Value::Array(items) if items.len() == count => items.iter().map(number).collect(),
                Value::Array(_) => None,
                one => Some(vec![number(one)?; count]),
            }
        })
    }

    /// Which of `count` layers have a window: a number n (every n-th layer has none), or an array of
    /// truth values.
    ///
    /// # Errors
    /// When it is missing, has another length, or holds something else.
    pub fn window_pattern(&self, key: &str, count: usize) -> Result<Vec<bool>, GgufError> {
        let expected = format!("a whole number above 0, or an array of {count} truth values");
        self.read(key, &expected, |value| match value {
            Value::Array(items) if items.len() == count => items
                .iter()
                .map(|item| match item {
                    Value::Bool(windowed) => Some(*windowed),
                    other => integer(other).filter(|value| (0..=1).contains(value)).map(|value| value == 1),
                })
                .collect(),
            Value::Array(_) => None,
            one => {
                let period = unsigned(one).filter(|period| *period > 0)? as usize;
                Some((0..count).map(|layer| layer % period < period - 1).collect())
            }
        })
    }

    /// An array of texts.
    ///
    /// # Errors
    /// When it is missing or holds something else.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        self.array(key, "an array of texts", |item| match item {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// An array of numbers.
    ///
    /// # Errors
    /// When it is missing or holds something else.
    pub fn floats(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.array(key, "an array of numbers", |item| match item {
            Value::F32(value) => Some(*value),
            Value::F64(value) => Some(*value as f32),
            _ => None,
        })
    }

    /// An array of whole numbers.
    ///
    /// # Errors
    /// When it is missing or holds something else.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, GgufError> {
        self.array(key, "an array of whole numbers", integer)
    }

    fn array<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Vec<T>, GgufError> {
        self.read(key, expected, |value| match value {
            Value::Array(items) => items.iter().map(convert).collect(),
            _ => None,
        })
    }
}

fn bad(key: &str, value: &Value, expected: &str) -> GgufError {
    GgufError::BadValue { key: key.to_owned(), found: shorten(value), expected: expected.to_owned() }
}

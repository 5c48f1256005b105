//! Formats, quantised caches and the tolerance table.

use attache_reference::{
    Format, Mismatch, ReferenceError, compare_lse, compare_out,
    quantised_cache::{
        CacheShape, PerTokenHead, Scales, TokenHeadCache, decode, decode_per_token_head, encode, encode_per_token_head,
    },
    tolerance,
    tolerance::tolerance_mla_expanded,
};
use half::{bf16, f16};
use proptest::prelude::*;

#[test]
fn patterns_mean_what_the_specifications_say() {
    let table = [
        (Format::Fp8E4m3, 0x00, 0.0),
        (Format::Fp8E4m3, 0x01, 2f64.powi(-9)),
        (Format::Fp8E4m3, 0x07, 7.0 * 2f64.powi(-9)),
        (Format::Fp8E4m3, 0x08, 2f64.powi(-6)),
        (Format::Fp8E4m3, 0x38, 1.0),
        (Format::Fp8E4m3, 0xb8, -1.0),
        (Format::Fp8E4m3, 0x7e, 448.0),
        (Format::Fp8E5m2, 0x01, 2f64.powi(-16)),
        (Format::Fp8E5m2, 0x3c, 1.0),
        (Format::Fp8E5m2, 0x7b, 57344.0),
        (Format::Fp8E5m2, 0x7c, f64::INFINITY),
        (Format::Fp8E4m3Fnuz, 0x7f, 240.0),
        (Format::Fp8E4m3Fnuz, 0x40, 1.0),
        (Format::Fp8E5m2Fnuz, 0x7f, 57344.0),
        (Format::Int8, 0x80, -128.0),
        (Format::Int4, 0x0f, -1.0),
        (Format::Int4, 0x08, -8.0),
    ];
    for (format, bits, value) in table {
        assert_eq!(format.decode(bits), value, "{format:?} {bits:#x}");
    }
    for (format, bits) in [
        (Format::Fp8E4m3, 0x7f),
        (Format::Fp8E4m3, 0xff),
        (Format::Fp8E5m2, 0x7d),
        (Format::Fp8E4m3Fnuz, 0x80),
        (Format::Fp8E5m2Fnuz, 0x80),
    ] {
        assert!(format.decode(bits).is_nan() && format.round(f64::NAN).is_nan(), "{format:?} {bits:#x}");
    }
    for format in Format::ALL {
        assert!(format.max_finite().is_finite());
        let saturates = format.is_fp8() || format.is_integer();
        for beyond in [1e40, f64::INFINITY] {
            let expected = if saturates { format.max_finite() } else { f64::INFINITY };
            assert_eq!(format.round(beyond), expected, "{format:?}");
        }
    }
    // Half way between 16 and 18, and between 18 and 20: to the even mantissa.
    assert_eq!((Format::Fp8E4m3.round(17.0), Format::Fp8E4m3.round(19.0)), (16.0, 20.0));
    assert_eq!(Format::Fp8E4m3Fnuz.encode(-0.0), 0, "there is no negative zero");
}

#[test]
fn every_pattern_reads_back_as_itself() {
    for format in Format::ALL.into_iter().filter(|format| format.bits() <= 16) {
        for bits in 0..1_u32 << format.bits() {
            let value = format.decode(bits);
            if value.is_finite() {
                assert_eq!(format.encode(value), bits, "{format:?} {bits:#x} {value}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// The half formats and f32 against code that somebody else wrote.
    #[test]
    fn rounding_agrees_with_others(bits in any::<u64>(), exponent in -160_i32..160) {
        let value = f64::from_bits(bits & !(0x7ff << 52) | ((1023 + exponent) as u64) << 52);
        prop_assert_eq!(Format::F32.round(value), f64::from(value as f32));
        // From f32: `half` looks at the upper half of an f64 only.
        let value = value as f32;
        prop_assert_eq!(Format::F16.round(f64::from(value)), f16::from_f32(value).to_f64());
        prop_assert_eq!(Format::Bf16.round(f64::from(value)), bf16::from_f32(value).to_f64());
    }
}

const SHAPE: CacheShape = CacheShape { tokens: 3, num_kv_heads: 2, head_size: 5 };

fn values() -> Vec<f64> {
    (0..30).map(|i| (f64::from(i) * 1.3).sin() * f64::from(1 + i % 7)).collect()
}

#[test]
fn scales_belong_to_tensors_heads_or_tokens() {
    let values = values();
    let scales = [0.01, 0.5];
    let bytes = encode(Format::Fp8E4m3, &values, &SHAPE, Scales::PerHead(&scales)).unwrap();
    let back = decode(Format::Fp8E4m3, &bytes, &SHAPE, Scales::PerHead(&scales)).unwrap();
    for (at, (value, back)) in values.iter().zip(&back).enumerate() {
        let scale = f64::from(scales[at / 5 % 2]);
        assert_eq!(*back, Format::Fp8E4m3.round(value / scale) * scale);
    }
    for kind in [PerTokenHead::Int8, PerTokenHead::Fp8E4m3, PerTokenHead::Int4] {
        let mut values = values.clone();
        values[5..10].fill(0.0);
        let cache = encode_per_token_head(kind, &values, &SHAPE).unwrap();
        assert_eq!((cache.scales.len(), cache.scales[1]), (6, 0.0), "a head of zeros");
        let back = decode_per_token_head(kind, &cache, &SHAPE).unwrap();
        for (row, back) in values.chunks(5).zip(back.chunks(5)) {
            let largest = row.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
            let step = if kind == PerTokenHead::Fp8E4m3 { largest / 16.0 } else { largest / kind.limit() / 2.0 };
            assert!(row.iter().zip(back).all(|(a, b)| (a - b).abs() <= step * 1.001), "{kind:?} {row:?} {back:?}");
        }
    }
    // Low nibble first.
    let shape = CacheShape { tokens: 1, num_kv_heads: 1, head_size: 3 };
    let cache = encode_per_token_head(PerTokenHead::Int4, &[7.0, -7.0, 1.0], &shape).unwrap();
    assert_eq!(cache, TokenHeadCache { data: vec![0x97, 0x01], scales: vec![1.0] });
}

#[test]
fn caches_refuse_what_they_cannot_hold() {
    let values = values();
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(encode(Format::Int8, &values, &SHAPE, Scales::PerTensor(scale)).is_err(), "{scale}");
    }
    assert!(encode(Format::F16, &values, &SHAPE, Scales::PerTensor(1.0)).is_err());
    assert!(encode(Format::Fp8E4m3, &values, &SHAPE, Scales::PerHead(&[1.0])).is_err());
    assert!(encode(Format::Fp8E4m3, &values[1..], &SHAPE, Scales::PerTensor(1.0)).is_err());
    assert!(encode(Format::Int8, &[f64::NAN; 30], &SHAPE, Scales::PerTensor(1.0)).is_err());
    assert!(encode(Format::Fp8E4m3, &[f64::NAN; 30], &SHAPE, Scales::PerTensor(1.0)).is_ok());
    for bad in [f64::NAN, f64::INFINITY, 1e300] {
        assert!(encode_per_token_head(PerTokenHead::Int8, &[bad; 30], &SHAPE).is_err(), "{bad}");
    }
    assert!(Format::Int4.decode_slice(&[0; 2], 5).is_err());
}

#[test]
fn one_wrong_element_is_found() {
    let table = tolerance(Format::F32, Format::F32).unwrap();
    let right = vec![0.5; 100];
    let mut found = right.clone();
    found[41] += 1.5e-5;
    let report = compare_out(&found, &right, 1.0, &table).unwrap();
    assert!(report.worst_index == 41 && report.max_fraction > 0.4, "{report:?}");
    found[42] += 1e-4;
    match compare_out(&found, &right, 1.0, &table) {
        Err(Mismatch::Element { index: 42, count: 1, total: 100, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(compare_out(&found, &right, 100.0, &table).is_ok(), "relative to the values");
    for (found, expected, matches) in [
        (f64::NAN, f64::NAN, false),
        (f64::NAN, 0.0, false),
        (f64::NEG_INFINITY, f64::NEG_INFINITY, true),
        (f64::NEG_INFINITY, -1e300, false),
        (-1e300, f64::NEG_INFINITY, false),
        (f64::INFINITY, f64::NEG_INFINITY, false),
    ] {
        assert_eq!(compare_lse(&[found], &[expected], &table).is_ok(), matches, "{found} {expected}");
    }
    assert!(matches!(compare_out(&[1.0], &[1.0, 2.0], 1.0, &table), Err(Mismatch::Length { .. })));
    assert!(matches!(compare_out(&[1.0], &[1.0], f64::NAN, &table), Err(Mismatch::Parameter { .. })));
}

#[test]
fn the_table_is_ordered() {
    let abs = |compute, cache| tolerance(compute, cache).unwrap().out_abs;
    assert!(abs(Format::F32, Format::Fp8E4m3) < abs(Format::F16, Format::F16));
    assert!(abs(Format::F16, Format::F16) < abs(Format::F16, Format::Int8));
    assert!(abs(Format::F16, Format::F16) < abs(Format::Bf16, Format::Bf16));
    assert_eq!(tolerance_mla_expanded(Format::Bf16).unwrap(), tolerance(Format::Bf16, Format::Int8).unwrap());
    assert!(matches!(tolerance(Format::Int8, Format::Int8), Err(ReferenceError::Format { .. })));
}

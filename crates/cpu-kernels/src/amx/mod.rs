//! Intel's Advanced Matrix Extensions (AMX): whether this process may use them, and tiles of bf16.
//!
//! Owns every instruction that touches a tile register: the compiler has no stable intrinsics for
//! them yet, so they are written as assembly. Facts are those of Intel's Software Developer's Manual
//! and of the kernel's `arch_prctl` interface. Must not know: attention.

mod products;

pub(crate) use products::{Narrow, Wide};

use std::{
    arch::{asm, x86_64::__cpuid_count},
    sync::OnceLock,
};

/// Rows of a tile, and pairs of bf16 (or f32) in one of its rows.
pub(crate) const SIDE: usize = 16;

/// Whether processor and operating system have bf16 tiles, and this process may use them.
///
/// Tiles are off until a process asks: Linux saves them only for those that did.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && ask_permission())
}

/// The feature bits, and the operating system's word that it saves tiles.
fn has_tiles() -> bool {
    if cfg!(miri) || !is_x86_feature_detected!("xsave") {
        return false;
    }
    // The standard library does not name these two features yet. Leaf 7: bf16 is bit 22, tiles bit 24.
    let features = __cpuid_count(7, 0).edx;
    if features & (1 << 22) == 0 || features & (1 << 24) == 0 {
        return false;
    }
    let (low, _high): (u32, u32);
    // SAFETY: XGETBV of register 0 is there whenever `xsave` was found enabled.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high, options(nomem, nostack)) };
    // Bits 17 and 18: the tiles' configuration and their data.
    low & (0b11 << 17) == 0b11 << 17
}

/// Asks Linux for the tiles' data, once for the whole process.
#[cfg(target_os = "linux")]
fn ask_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the call reads its two numbers and touches no memory of ours; the two registers are
    // those that a system call overwrites.
    unsafe {
        asm!(
            "syscall",
            inout("rax") result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_permission() -> bool {
    false
}

/// What LDTILECFG reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row, by tile.
    row_bytes: [u16; 16],
    /// Rows, by tile.
    rows: [u8; 16],
}

/// Tiles, configured for this thread until they are dropped.
pub(crate) struct Tiles(());

impl Tiles {
    /// Eight tiles with rows of 64 bytes, each with as many rows as said: 1 … 16.
    ///
    /// # Safety
    /// [`is_available`] must have said so; the thread must hold no other tiles.
    #[inline(always)]
    pub unsafe fn new(rows: [usize; 8]) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (tile, rows) in rows.into_iter().enumerate() {
            config.row_bytes[tile] = 64;
            config.rows[tile] = rows.clamp(1, SIDE) as u8;
        }
        // SAFETY: palette 1 has eight tiles of up to 16 rows of 64 bytes; the rest is the caller's word.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for Tiles {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: whoever holds a `Tiles` may use tiles. Released tiles cost nothing when the thread
        // is switched out.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem)
            );
        }
    }
}

// Values pass from one of these to the next in tile registers, which the compiler never uses: it is
// told of each that is written, and that the order counts.

/// `zero!("tmm0")`: the tile becomes zeros. Wherever one of these stands, a [`Tiles`] lives.
macro_rules! zero {
    ($tile:tt) => {
        std::arch::asm!(concat!("tilezero ", $tile), out($tile) _, options(nostack, nomem))
    };
}

/// `load!("tmm0", from, stride)`: the tile from rows `stride` bytes apart.
macro_rules! load {
    ($tile:tt, $from:expr, $stride:expr) => {
        std::arch::asm!(
            concat!("tileloadd ", $tile, ", [{from} + {stride} * 1]"),
            from = in(reg) $from,
            stride = in(reg) $stride,
            out($tile) _,
            options(nostack, readonly)
        )
    };
}

/// `store!("tmm0", to, stride)`: the tile to rows `stride` bytes apart.
macro_rules! store {
    ($tile:tt, $to:expr, $stride:expr) => {
        std::arch::asm!(
            concat!("tilestored [{to} + {stride} * 1], ", $tile),
            to = in(reg) $to,
            stride = in(reg) $stride,
            options(nostack)
        )
    };
}

/// `dot!(c, a, b)`: `c += a · b`, with rows of pairs of bf16 in `a`, and pairs of rows in `b`.
macro_rules! dot {
    ($c:tt, $a:tt, $b:tt) => {
        std::arch::asm!(concat!("tdpbf16ps ", $c, ", ", $a, ", ", $b), out($c) _, options(nostack, nomem))
    };
}

use {dot, load, store, zero};

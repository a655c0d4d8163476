//! Compares the decoder with a second decoder, which reads fields bit by bit from the standards' tables.

use super::*;
use crate::Key;
use proptest::prelude::*;

/// A field of a CDB: first byte, highest bit in that byte, number of bits.
type Field = (usize, u8, u32);

const LBA_OF: [(usize, Field); 4] = [(6, (1, 4, 21)), (10, (2, 7, 32)), (12, (2, 7, 32)), (16, (2, 7, 64))];
const BLOCKS_OF: [(usize, Field); 4] =
    [(6, (4, 7, 8)), (10, (7, 7, 16)), (12, (6, 7, 32)), (16, (10, 7, 32))];

fn field(cdb: &[u8], (byte, bit, bits): Field) -> u64 {
    let first = byte * 8 + usize::from(7 - bit);
    (first..first + bits as usize)
        .fold(0, |value, at| value << 1 | u64::from(cdb[at / 8] >> (7 - at % 8) & 1))
}

/// Opcodes of commands that move blocks, and the length of their CDBs in bytes.
const READS: [(u8, usize); 4] = [(0x08, 6), (0x28, 10), (0xa8, 12), (0x88, 16)];
const WRITES: [(u8, usize); 4] = [(0x0a, 6), (0x2a, 10), (0xaa, 12), (0x8a, 16)];

/// The transfer of a read or a write according to the tables.
fn naive(cdb: &[u8], len: usize) -> Result<Transfer, (u8, u8)> {
    let of = |table: [(usize, Field); 4]| table.into_iter().find(|(l, _)| *l == len).unwrap().1;
    let six = len == 6;
    let naca = field(cdb, (len - 1, 2, 1));
    let protection = if six { 0 } else { field(cdb, (1, 7, 3)) };
    if naca != 0 || protection != 0 {
        return Err((0x24, 0));
    }
    let blocks = match field(cdb, of(BLOCKS_OF)) {
        0 if six => 256,
        n => n,
    };
    Ok(Transfer {
        lba: Lba(field(cdb, of(LBA_OF))),
        blocks: Blocks(blocks),
        fua: !six && field(cdb, (1, 3, 1)) == 1,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn reads_and_writes_are_as_the_tables_say(mut cdb in any::<[u8; 16]>(), which in 0..8usize, plain in any::<bool>()) {
        let (opcode, len) = if which < 4 { READS[which] } else { WRITES[which - 4] };
        cdb[0] = opcode;
        if plain {
            cdb[1] &= 0x1f;
            cdb[len - 1] = 0;
        }
        let decoded = match decode(&cdb) {
            Ok(Command::Read(t)) if which < 4 => Ok(t),
            Ok(Command::Write(t)) if which >= 4 => Ok(t),
            Ok(other) => panic!("{other:?}"),
            Err(sense) => Err(sense.code),
        };
        prop_assert_eq!(decoded, naive(&cdb, len));
        // Bytes behind the end of the CDB make no difference; missing bytes do.
        prop_assert_eq!(decode(&cdb[..len]), decode(&cdb));
        for short in 1..len {
            prop_assert_eq!(decode(&cdb[..short]), Err(Sense::in_cdb(short as u16)));
        }
    }

    #[test]
    fn any_bytes_are_a_command_or_an_illegal_request(cdb in proptest::collection::vec(any::<u8>(), 0..40)) {
        if let Err(sense) = decode(&cdb) {
            prop_assert_eq!(sense.key, Key::IllegalRequest);
            let field = sense.field;
            prop_assert!(field.is_none_or(|f| f.in_cdb && usize::from(f.byte) < 16), "{:?}", field);
        }
    }
}

#[test]
fn every_opcode_at_every_length() {
    for opcode in 0..=255u8 {
        for fill in [0u8, 0x11, 0xff] {
            let mut cdb = [fill; 33];
            cdb[0] = opcode;
            for len in 0..=33 {
                let _ = decode(&cdb[..len]);
            }
        }
    }
    assert_eq!(decode(&[]), Err(Sense::OPCODE));
    // Opcodes of variable length, vendor-specific ones, and one that is not offered.
    for opcode in [0x7f, 0xc0, 0xff, 0x04] {
        assert_eq!(decode(&[opcode; 16]), Err(Sense::OPCODE));
    }
}

#[test]
fn unsupported_features_are_refused_at_their_field() {
    let refused = |cdb: &[u8]| decode(cdb).unwrap_err();
    assert_eq!(refused(&[0x28, 0x20, 0, 0, 0, 0, 0, 0, 1, 0]), Sense::in_cdb_bit(1, 7), "RDPROTECT");
    assert_eq!(refused(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 4]), Sense::in_cdb_bit(9, 2), "NACA");
    assert_eq!(refused(&[0x41, 0x10, 0, 0, 0, 0, 0, 0, 1, 0]), Sense::in_cdb_bit(1, 4), "ANCHOR");
    assert_eq!(refused(&[0x12, 0, 0x80, 0, 36, 0]), Sense::in_cdb(2), "a page without EVPD");
    assert_eq!(refused(&[0x1b, 0, 0, 0, 2, 0]), Sense::in_cdb_bit(4, 1), "LOEJ");
    assert_eq!(refused(&[0x2f, 4, 0, 0, 0, 0, 0, 0, 1, 0]), Sense::in_cdb_bit(1, 2), "BYTCHK of 2");
    let mut unknown = [0; 16];
    (unknown[0], unknown[1]) = (0x9e, 0x11);
    assert_eq!(refused(&unknown), Sense::in_cdb_bit(1, 4), "a service action");
}

#[test]
fn fields_of_the_other_commands() {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (0x93, 0x09);
    cdb[2..10].copy_from_slice(&0x0102_0304_0506_0708u64.to_be_bytes());
    cdb[10..14].copy_from_slice(&0x0a0b_0c0du32.to_be_bytes());
    let same = Command::WriteSame {
        lba: Lba(0x0102_0304_0506_0708),
        blocks: Blocks(0x0a0b_0c0d),
        unmap: true,
        zeroes: true,
    };
    assert_eq!(decode(&cdb), Ok(same));
    (cdb[0], cdb[1], cdb[13]) = (0x89, 0x08, 7);
    let transfer = Transfer { lba: Lba(0x0102_0304_0506_0708), blocks: Blocks(7), fua: true };
    assert_eq!(decode(&cdb), Ok(Command::CompareAndWrite(transfer)));
    let sense = [0x5a, 0x18, 0x9c, 2, 0, 0, 0, 1, 2, 0];
    let (control, page) = (PageControl::Default, 0x1c);
    let expected = Command::ModeSense {
        ten: true,
        no_blocks: true,
        long: true,
        control,
        page,
        subpage: 2,
        allocation: 258,
    };
    assert_eq!(decode(&sense), Ok(expected));
    let reserve = [0x5f, 0x04, 0x15, 0, 0, 1, 2, 3, 4, 0];
    assert_eq!(
        decode(&reserve),
        Ok(Command::ReserveOut { action: 4, scope: 1, kind: 5, length: 0x0102_0304 })
    );
}

#[test]
fn the_fast_path_decodes_as_the_full_decoder_does() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut found = 0;
    for round in 0..20_000_u64 {
        let cdb: [u8; 32] = std::array::from_fn(|i| {
            let byte = random.u8(..);
            match i {
                0 => [0x28, 0x2a, 0x88, 0x8a][round as usize % 4],
                // Few bits are set, so that the fast path takes the CDB.
                1 | 9 | 15 if round % 2 == 0 => byte & (0x18 * u8::from(i == 1)),
                _ => byte,
            }
        });
        let len = if round % 5 == 0 { round as usize % 33 } else { 32 };
        if let Some((op, transfer)) = plain(&cdb[..len]) {
            found += 1;
            let command = if op == Op::Read { Command::Read(transfer) } else { Command::Write(transfer) };
            assert_eq!(decode(&cdb[..len]), Ok(command), "{cdb:02x?}");
        }
    }
    assert!(found > 5_000, "{found}");
}

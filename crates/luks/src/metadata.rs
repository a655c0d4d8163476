//! The JSON text of a LUKS2 header: parsed within limits, checked, changed. Any context.
//!
//! The text is kept as a tree of values, so that a change leaves alone what this crate does not know, such as tokens. Numbers of
//! 64 bits are decimal texts in JSON.

use std::num::NonZeroU32;
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value, json};

use crate::error::{Error, shown};
use crate::hash::Hash;
use crate::header::{Digest, Layout};
use crate::kdf::{Argon2Variant, Kdf};
use crate::limits::Limits;
use crate::segment::{AES_XTS, Cipher, Segment};
use crate::slot::{KeySlot, Priority, material_len, overlap};
use crate::stripes::STRIPES;
use crate::v2::Meta;

/// Number of key slots, and of other objects of one kind.
const OBJECTS_MAX: u32 = 32;
/// Depth of objects and lists; LUKS2 has five.
const DEPTH_MAX: usize = 12;
/// Longest salt or digest, in bytes.
const BYTES_MAX: usize = 64;
/// Areas of key slots begin at multiples of this.
const ALIGNMENT: u64 = 4096;
/// Start of the data in a new header.
pub(crate) const DATA_OFFSET: u64 = 16 << 20;
/// The field with key slots: in the header it has the key slots, in a digest or a token their numbers.
const SLOTS: &str = "keyslots";

/// Parses the text of a header. Its depth and its number of values are bounded before memory is allocated for them.
pub(crate) fn parse(text: &[u8], limits: &Limits) -> Result<Map<String, Value>, Error> {
    check_shape(text, limits)?;
    // The text of serde_json's error may have a part of the header.
    serde_json::from_slice(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Error::invalid(format!("its text is no JSON object: line {line}, column {column}"))
    })
}

fn check_shape(text: &[u8], limits: &Limits) -> Result<(), Error> {
    let (mut depth, mut values, mut in_string, mut escaped) = (0_usize, 0_usize, false, false);
    for &byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => (depth, values) = (depth + 1, values + 1),
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' => values += 1,
            _ => {}
        }
        if depth > DEPTH_MAX || values > limits.json_values_max {
            return Err(Error::invalid(
                "its JSON text is too deep, or has more values than the limits allow",
            ));
        }
    }
    Ok(())
}

/// What the text says, checked. A copy has `size` bytes, of which `json_size` are for the text.
pub(crate) fn layout(json: &Map<String, Value>, size: u64, json_size: u64) -> Result<Layout, Error> {
    let root = Object { place: "header".into(), map: json };
    let config = root.object("config")?;
    refuse_requirements(&config)?;
    if config.decimal("json_size")? != json_size {
        return Err(Error::invalid("its two sizes of the JSON text differ"));
    }
    let region = region(&root, size)?;
    let areas = areas(&root, &region)?;
    let (segment_id, segment) = the_segment(&root, &region)?;
    let (digest, slot_ids) = the_digest(&root, segment_id)?;
    let mut slots = Vec::new();
    for (number, slot) in root.object(SLOTS)?.children()? {
        if slot_ids.contains(&number) {
            let area = areas.iter().find(|(of, _)| *of == number).map(|(_, area)| area.clone());
            slots.push(key_slot(number, &slot, area.expect("every key slot has an area"))?);
        }
    }
    let key_len = slots.first().ok_or_else(|| Error::invalid("no key slot opens its data"))?.key_len;
    if slots.len() != slot_ids.len() || slots.iter().any(|slot| slot.key_len != key_len) {
        return Err(Error::invalid("a key slot of its digest is missing, or has another key length"));
    }
    let segment = Segment { cipher: Cipher::parse(AES_XTS, key_len as u64)?, ..segment };
    Ok(Layout { segment, digest, slots })
}

/// A header of a disk that is being reencrypted, or needs hardware, has requirements.
fn refuse_requirements(config: &Object<'_>) -> Result<(), Error> {
    let Some(requirements) = config.optional("requirements") else { return Ok(()) };
    let mandatory = config.as_object("requirements", requirements)?;
    match mandatory.optional("mandatory") {
        None => Ok(()),
        Some(_) => match mandatory.texts("mandatory")?.first() {
            None => Ok(()),
            Some(name) => Err(Error::unsupported("requirement", name)),
        },
    }
}

/// Where areas of key slots may be.
fn region(root: &Object<'_>, size: u64) -> Result<Range<u64>, Error> {
    let len = root.object("config")?.decimal("keyslots_size")?;
    let end = (2 * size).checked_add(len).ok_or_else(|| Error::invalid("the size of its key slots"))?;
    Ok(2 * size..end)
}

/// The areas of all key slots, also of those that this crate does not know.
fn areas(root: &Object<'_>, region: &Range<u64>) -> Result<Vec<(u32, Range<u64>)>, Error> {
    let mut areas: Vec<(u32, Range<u64>)> = Vec::new();
    for (number, slot) in root.object(SLOTS)?.children()? {
        let area = slot.object("area")?;
        let start = area.decimal("offset")?;
        let end = start.checked_add(area.decimal("size")?).filter(|&end| end <= region.end && start < end);
        let end = end.filter(|_| start >= region.start);
        let area = start..end.ok_or_else(|| area.invalid("is not in the part for key slots"))?;
        if areas.iter().any(|(_, other)| overlap(other, &area)) {
            return Err(slot.invalid("has an area that overlaps another one"));
        }
        areas.push((number, area));
    }
    Ok(areas)
}

/// The only segment, with a cipher that is set later: the header has the key's length in its key slots.
fn the_segment(root: &Object<'_>, region: &Range<u64>) -> Result<(u32, Segment), Error> {
    let segments = root.object("segments")?.children()?;
    let [(number, segment)] = &segments[..] else {
        return Err(Error::Unsupported { what: "number of segments:", name: segments.len().to_string() });
    };
    match segment.text("type")? {
        "crypt" => {}
        other => return Err(Error::unsupported("segment", other)),
    }
    if let Some(integrity) = segment.optional("integrity") {
        let name = integrity["type"].as_str().unwrap_or("integrity");
        return Err(Error::unsupported("integrity", name));
    }
    if segment.optional("flags").is_some()
        && let Some(flag) = segment.texts("flags")?.first()
    {
        return Err(Error::unsupported("segment flag", flag));
    }
    let cipher = Cipher::parse(segment.text("encryption")?, Cipher::Aes256Xts.key_len() as u64)?;
    let sector_size = segment.number("sector_size")?;
    if !matches!(sector_size, 512 | 1024 | 2048 | 4096) {
        return Err(segment.invalid(&format!("has sectors of {sector_size} bytes")));
    }
    let offset = segment.decimal("offset")?;
    let size = match segment.text("size")? {
        "dynamic" => None,
        _ => Some(segment.decimal("size")?),
    };
    let is_aligned = offset.is_multiple_of(512) && size.is_none_or(|size| size.is_multiple_of(sector_size));
    let has_end = size.is_none_or(|size| size > 0 && offset.checked_add(size).is_some());
    if !is_aligned || !has_end || (offset != 0 && offset < region.end) {
        return Err(segment.invalid("is not aligned, is empty, or overlaps the header"));
    }
    let iv_tweak = segment.decimal("iv_tweak")?;
    let segment = Segment { offset, size, cipher, sector_size: sector_size as u32, iv_tweak };
    Ok((*number, segment))
}

/// The digest of the segment's key, and its key slots.
fn the_digest(root: &Object<'_>, segment: u32) -> Result<(Digest, Vec<u32>), Error> {
    let mut found = None;
    for (_, digest) in root.object("digests")?.children()? {
        if digest.ids("segments")?.contains(&segment) && found.replace(digest).is_some() {
            return Err(Error::invalid("its data has two digests"));
        }
    }
    let digest = found.ok_or_else(|| Error::invalid("its data has no digest"))?;
    match digest.text("type")? {
        "pbkdf2" => {}
        other => return Err(Error::unsupported("digest", other)),
    }
    let bytes = digest.bytes("digest")?;
    if bytes.len() < 16 {
        // Few bytes would accept wrong keys.
        return Err(digest.invalid("is too short"));
    }
    let slots = digest.ids("keyslots")?;
    let digest = Digest {
        hash: Hash::parse(digest.text("hash")?)?,
        iterations: digest.positive("iterations")?,
        salt: digest.bytes("salt")?,
        digest: bytes,
    };
    Ok((digest, slots))
}

fn key_slot(number: u32, slot: &Object<'_>, area: Range<u64>) -> Result<KeySlot, Error> {
    match slot.text("type")? {
        "luks2" => {}
        other => return Err(Error::unsupported("key slot", other)),
    }
    let key_len = slot.number("key_size")?;
    let cipher = Cipher::parse(AES_XTS, key_len)?;
    let stripes = slot.object("af")?;
    match stripes.text("type")? {
        "luks1" => {}
        other => return Err(Error::unsupported("anti-forensic splitter", other)),
    }
    let encrypted = slot.object("area")?;
    match encrypted.text("type")? {
        "raw" => {}
        other => return Err(Error::unsupported("key slot area", other)),
    }
    let area_cipher = Cipher::parse(encrypted.text("encryption")?, encrypted.number("key_size")?)?;
    let kdf = slot.object("kdf")?;
    let priority = match slot.optional("priority").map(|_| slot.number("priority")).transpose()? {
        None | Some(1) => Priority::Normal,
        Some(0) => Priority::Ignore,
        Some(2) => Priority::Prefer,
        Some(_) => return Err(slot.invalid("has an unknown priority")),
    };
    let slot = KeySlot {
        number,
        priority,
        key_len: cipher.key_len(),
        stripes: stripes.positive("stripes")?.get(),
        stripes_hash: Hash::parse(stripes.text("hash")?)?,
        area,
        area_key_len: area_cipher.key_len(),
        kdf: parse_kdf(&kdf)?,
        salt: kdf.bytes("salt")?,
    };
    slot.check()?;
    Ok(slot)
}

fn parse_kdf(kdf: &Object<'_>) -> Result<Kdf, Error> {
    let variant = match kdf.text("type")? {
        "pbkdf2" => {
            let hash = Hash::parse(kdf.text("hash")?)?;
            return Ok(Kdf::Pbkdf2 { hash, iterations: kdf.positive("iterations")? });
        }
        "argon2i" => Argon2Variant::I,
        "argon2id" => Argon2Variant::Id,
        other => return Err(Error::unsupported("key derivation", other)),
    };
    Ok(Kdf::Argon2 {
        variant,
        passes: kdf.positive("time")?.get(),
        memory_kib: kdf.positive("memory")?.get(),
        lanes: kdf.positive("cpus")?.get(),
    })
}

/// The text of a new header without key slots.
pub(crate) fn empty(sector_size: u32, digest: &Digest) -> Map<String, Value> {
    let text = json!({
        SLOTS: {},
        "tokens": {},
        "segments": {"0": {
            "type": "crypt",
            "offset": DATA_OFFSET.to_string(),
            "size": "dynamic",
            "iv_tweak": "0",
            "encryption": AES_XTS,
            "sector_size": sector_size,
        }},
        "digests": {"0": {
            "type": "pbkdf2",
            SLOTS: [],
            "segments": ["0"],
            "hash": digest.hash.name(),
            "iterations": digest.iterations,
            "salt": BASE64.encode(&digest.salt),
            "digest": BASE64.encode(&digest.digest),
        }},
        "config": {
            "json_size": Meta::json_size_of_new().to_string(),
            "keyslots_size": (DATA_OFFSET - 2 * Meta::size_of_new()).to_string(),
        },
    });
    let Value::Object(map) = text else { unreachable!("an object was written") };
    map
}

/// What [`empty`] says; the header gets the key's length with its first key slot.
pub(crate) fn empty_layout(cipher: Cipher, sector_size: u32, digest: Digest) -> Result<Layout, Error> {
    if !matches!(sector_size, 512 | 1024 | 2048 | 4096) {
        return Err(Error::Unsupported { what: "sector size", name: sector_size.to_string() });
    }
    let segment = Segment { offset: DATA_OFFSET, size: None, cipher, sector_size, iv_tweak: 0 };
    Ok(Layout { segment, digest, slots: Vec::new() })
}

/// Adds a key slot with this number or the first free one, with an area that no other has.
pub(crate) fn add_slot(
    json: &mut Map<String, Value>,
    size: u64,
    number: Option<u32>,
    kdf: Kdf,
    salt: Vec<u8>,
    key_len: usize,
) -> Result<KeySlot, Error> {
    let root = Object { place: "header".into(), map: json };
    let region = region(&root, size)?;
    let areas = areas(&root, &region)?;
    let is_free = |number: &u32| *number < OBJECTS_MAX && areas.iter().all(|(of, _)| of != number);
    let number = match number {
        Some(number) if is_free(&number) => number,
        Some(number) => return Err(Error::SlotTaken(number)),
        None => (0..OBJECTS_MAX).find(is_free).ok_or(Error::NoRoom)?,
    };
    let area = free_area(&areas, &region, material_len(key_len, STRIPES) as u64)?;
    let slot = KeySlot {
        number,
        priority: Priority::Normal,
        key_len,
        stripes: STRIPES,
        stripes_hash: Hash::Sha256,
        area,
        area_key_len: key_len,
        kdf,
        salt,
    };
    slot.check()?;
    let segment = the_segment(&root, &region)?.0;
    let digest = digest_of(&root, segment)?;
    json[SLOTS][number.to_string()] = slot_value(&slot);
    if let Value::Array(slots) = &mut json["digests"][digest][SLOTS] {
        slots.push(number.to_string().into());
    }
    Ok(slot)
}

/// The first gap of `len` bytes between areas.
fn free_area(areas: &[(u32, Range<u64>)], region: &Range<u64>, len: u64) -> Result<Range<u64>, Error> {
    let len = len.next_multiple_of(ALIGNMENT);
    let ends = areas.iter().filter_map(|(_, area)| area.end.checked_next_multiple_of(ALIGNMENT));
    let mut starts: Vec<_> = std::iter::once(region.start).chain(ends).collect();
    starts.sort_unstable();
    let fits =
        |area: &Range<u64>| area.end <= region.end && !areas.iter().any(|(_, other)| overlap(other, area));
    let candidates = starts.into_iter().filter_map(|start| Some(start..start.checked_add(len)?));
    candidates.into_iter().find(fits).ok_or(Error::NoRoom)
}

/// The name of the digest of a segment.
fn digest_of(root: &Object<'_>, segment: u32) -> Result<String, Error> {
    for (number, digest) in root.object("digests")?.children()? {
        if digest.ids("segments")?.contains(&segment) {
            return Ok(number.to_string());
        }
    }
    Err(Error::invalid("its data has no digest"))
}

fn slot_value(slot: &KeySlot) -> Value {
    let salt = BASE64.encode(&slot.salt);
    let kdf = match slot.kdf {
        Kdf::Pbkdf2 { hash, iterations } => {
            json!({"type": "pbkdf2", "hash": hash.name(), "iterations": iterations, "salt": salt})
        }
        Kdf::Argon2 { variant, passes, memory_kib, lanes } => {
            let name = match variant {
                Argon2Variant::I => "argon2i",
                Argon2Variant::Id => "argon2id",
            };
            json!({"type": name, "time": passes, "memory": memory_kib, "cpus": lanes, "salt": salt})
        }
    };
    json!({
        "type": "luks2",
        "key_size": slot.key_len,
        "af": {"type": "luks1", "stripes": slot.stripes, "hash": slot.stripes_hash.name()},
        "area": {
            "type": "raw",
            "offset": slot.area.start.to_string(),
            "size": (slot.area.end - slot.area.start).to_string(),
            "encryption": AES_XTS,
            "key_size": slot.area_key_len,
        },
        "kdf": kdf,
    })
}

/// Removes a key slot, also from the digests and tokens that name it.
pub(crate) fn remove_slot(json: &mut Map<String, Value>, number: u32) {
    let id = number.to_string();
    if let Some(Value::Object(slots)) = json.get_mut(SLOTS) {
        slots.remove(&id);
    }
    for kind in ["digests", "tokens"] {
        let Some(Value::Object(objects)) = json.get_mut(kind) else { continue };
        for object in objects.values_mut() {
            if let Some(Value::Array(slots)) = object.get_mut(SLOTS) {
                slots.retain(|slot| slot.as_str() != Some(&id));
            }
        }
    }
}

/// An object of the text, with its place for error texts.
struct Object<'a> {
    /// Field names and numbers only, never text of the header.
    place: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    fn invalid(&self, why: &str) -> Error {
        Error::invalid(format!("{} {why}", self.place))
    }

    fn optional(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name)
    }

    fn get(&self, name: &str) -> Result<&'a Value, Error> {
        self.optional(name).ok_or_else(|| self.invalid(&format!("has no {name}")))
    }

    fn wrong(&self, name: &str, expected: &str) -> Error {
        self.invalid(&format!("has a {name} that is not {expected}"))
    }

    fn object(&self, name: &str) -> Result<Self, Error> {
        self.as_object(name, self.get(name)?)
    }

    fn as_object(&self, name: &str, value: &'a Value) -> Result<Self, Error> {
        let map = value.as_object().ok_or_else(|| self.wrong(name, "an object"))?;
        Ok(Self { place: format!("{}.{name}", self.place), map })
    }

    /// The objects of a list by number, in order.
    fn children(&self) -> Result<Vec<(u32, Self)>, Error> {
        let mut children = Vec::new();
        for (name, value) in self.map {
            let number = id(name).ok_or_else(|| self.invalid(&format!("has the number {}", shown(name))))?;
            children.push((number, self.as_object(name, value)?));
        }
        children.sort_by_key(|(number, _)| *number);
        Ok(children)
    }

    fn text(&self, name: &str) -> Result<&'a str, Error> {
        self.get(name)?.as_str().ok_or_else(|| self.wrong(name, "a text"))
    }

    fn number(&self, name: &str) -> Result<u64, Error> {
        self.get(name)?.as_u64().ok_or_else(|| self.wrong(name, "a number"))
    }

    fn positive(&self, name: &str) -> Result<NonZeroU32, Error> {
        let number = u32::try_from(self.number(name)?).ok().and_then(NonZeroU32::new);
        number.ok_or_else(|| self.wrong(name, "a positive number of 32 bits"))
    }

    /// A number of 64 bits, as text.
    fn decimal(&self, name: &str) -> Result<u64, Error> {
        decimal(self.text(name)?).ok_or_else(|| self.wrong(name, "a decimal number of 64 bits"))
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>, Error> {
        let bytes = BASE64.decode(self.text(name)?).ok().filter(|bytes| bytes.len() <= BYTES_MAX);
        bytes.ok_or_else(|| self.wrong(name, "Base64 of at most 64 bytes"))
    }

    fn texts(&self, name: &str) -> Result<Vec<&'a str>, Error> {
        let list = self.get(name)?.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        list.ok_or_else(|| self.wrong(name, "a list of texts"))
    }

    /// A list of numbers of objects, each of them once.
    fn ids(&self, name: &str) -> Result<Vec<u32>, Error> {
        let ids: Option<Vec<u32>> = self.texts(name)?.into_iter().map(id).collect();
        let mut ids = ids.ok_or_else(|| self.wrong(name, "a list of numbers"))?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

/// The number of an object, from its name.
fn id(name: &str) -> Option<u32> {
    decimal(name).and_then(|id| u32::try_from(id).ok()).filter(|&id| id < OBJECTS_MAX)
}

/// Digits only, without leading zeroes.
fn decimal(text: &str) -> Option<u64> {
    let is_canonical =
        text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if is_canonical { text.parse().ok() } else { None }
}

//! The reference: one Markdown page per area, and a first page with links to them.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::model::{Api, Field, Kind, Method, Phase, Shape, Type};

/// The text of the first page before the tables.
const INTRODUCTION: &str = include_str!("reference.md");
const GENERATED: &str = "<!-- Made by `cargo xtask generate` of the types in `crates/rpc`. -->\n\n";

/// Methods of one page.
struct Area {
    /// File name of the page.
    page: &'static str,
    path: &'static str,
    title: &'static str,
    /// Prefixes of the methods' names.
    prefixes: &'static [&'static str],
}

/// In the order of the first page. A method belongs to the first area with a matching prefix.
const AREAS: [Area; 4] = [
    Area {
        page: "vhost.md",
        path: "docs/rpc/vhost.md",
        title: "Controllers",
        prefixes: &["vhost_", "virtio_"],
    },
    Area {
        page: "statistics.md",
        path: "docs/rpc/statistics.md",
        title: "Statistics, log and trace",
        prefixes: &[
            "bdev_get_iostat",
            "bdev_reset_iostat",
            "bdev_set_qd_",
            "bdev_enable_histogram",
            "bdev_get_histogram",
            "iobuf_get_",
            "log_",
            "notify_",
            "thread_",
            "trace_",
        ],
    },
    Area { page: "disks.md", path: "docs/rpc/disks.md", title: "Disks", prefixes: &["bdev_"] },
    Area { page: "daemon.md", path: "docs/rpc/daemon.md", title: "The daemon", prefixes: &[""] },
];

impl Area {
    fn of(method: &Method) -> &'static Self {
        let fits = |area: &&Self| area.prefixes.iter().any(|prefix| method.name.starts_with(prefix));
        AREAS.iter().find(fits).expect("the last area takes all")
    }

    fn methods<'a>(&'static self, api: &'a Api) -> impl Iterator<Item = &'a Method> {
        api.methods.iter().filter(|method| std::ptr::eq(Self::of(method), self))
    }
}

pub(super) fn files(api: &Api) -> Vec<(&'static str, String)> {
    let mut files = vec![("docs/rpc/README.md", first_page(api))];
    files.extend(AREAS.iter().map(|area| (area.path, page(api, area))));
    files
}

fn first_page(api: &Api) -> String {
    let mut text = format!("{GENERATED}{INTRODUCTION}");
    for area in &AREAS {
        let _ = write!(text, "\n## {}\n\n| method | |\n| --- | --- |\n", area.title);
        for method in area.methods(api) {
            let Method { name, summary, .. } = method;
            let _ = writeln!(text, "| [`{name}`]({}#{name}) | {summary} |", area.page);
        }
    }
    text
}

fn page(api: &Api, area: &'static Area) -> String {
    let mut text = format!(
        "{GENERATED}# {}\n\nHow calls are made, and what can go wrong, is on [the first page](README.md).\n",
        area.title
    );
    let mut named = Vec::new();
    for method in area.methods(api) {
        let (name, summary) = (&method.name, &method.summary);
        let _ = write!(text, "\n## {name}\n\n{summary}{}{}\n", phase(method.phase), right(method));
        if !method.params.is_empty() {
            text.push_str("\n| parameter | type | | |\n| --- | --- | --- | --- |\n");
            for param in &method.params {
                let need = if param.is_required { "required" } else { "" };
                let _ = writeln!(
                    text,
                    "| `{}` | {} | {need} | {} |",
                    param.name,
                    kind(&param.kind),
                    about(param)
                );
            }
        }
        let _ = write!(text, "\nResult: {}.\n", kind(&method.result));
        named.extend(method.params.iter().map(|param| &param.kind).chain([&method.result]));
    }
    text.push_str("\n# Types\n");
    for described in types_within(api, named) {
        describe(described, &mut text);
    }
    text
}

const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::StartUp => " Only before start-up is complete.",
        Phase::RunTime => "",
        Phase::Any => " At any time, also before start-up is complete.",
    }
}

const fn right(method: &Method) -> &'static str {
    if method.changes { "" } else { " For those who may only read, too." }
}

/// The named types that `kinds` refer to, directly or indirectly, by name.
fn types_within<'a>(api: &'a Api, mut kinds: Vec<&'a Kind>) -> Vec<&'a Type> {
    let mut names = BTreeSet::new();
    while let Some(kind) = kinds.pop() {
        match kind {
            Kind::List(item) => kinds.push(item),
            Kind::Named(name) if names.insert(name.as_str()) => {
                if let Some(Type { shape: Shape::Struct(fields), .. }) = api.find(name) {
                    kinds.extend(fields.iter().map(|field| &field.kind));
                }
            }
            _ => {}
        }
    }
    names.into_iter().filter_map(|name| api.find(name)).collect()
}

fn describe(described: &Type, text: &mut String) {
    let _ = write!(text, "\n## {}\n", described.name);
    if let Some(description) = &described.description {
        let _ = write!(text, "\n{description}\n");
    }
    match &described.shape {
        Shape::Enum(words) => {
            let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
            let _ = write!(text, "\nOne of {}.\n", words.join(", "));
        }
        Shape::Struct(fields) => {
            text.push_str("\n| member | type | | |\n| --- | --- | --- | --- |\n");
            for field in fields {
                let need = if field.is_required { "" } else { "may be missing" };
                let null = if field.is_required && field.is_nullable { " or `null`" } else { "" };
                let Field { name, .. } = field;
                let _ =
                    writeln!(text, "| `{name}` | {}{null} | {need} | {} |", kind(&field.kind), about(field));
            }
        }
    }
}

fn kind(kind: &Kind) -> String {
    match kind {
        Kind::Bool => "boolean".into(),
        Kind::Int(_) => "integer".into(),
        Kind::Text => "string".into(),
        Kind::List(item) => format!("list of {}", self::kind(item)),
        Kind::Named(name) => format!("[{name}](#{})", name.to_lowercase()),
        Kind::Object => "object".into(),
        Kind::Any => "anything".into(),
    }
}

/// The description and the default of a field.
fn about(field: &Field) -> String {
    let mut about = field.description.clone().unwrap_or_default();
    if let Some(default) = &field.default {
        let space = if about.is_empty() { "" } else { " " };
        let _ = write!(about, "{space}By default `{default}`.");
    }
    about.replace('|', "\\|")
}

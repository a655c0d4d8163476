"""Made by `cargo xtask generate`."""

VERSION = "0.1.0"

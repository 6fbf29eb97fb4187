//! Network cards and their rates, for a second machine.

#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use serde::{Deserialize, Serialize};
use std::fs;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Network {
    /// The physical cards, sorted by name; none if they could not be listed.
    pub cards: Option<Vec<Card>>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Card {
    pub name: String,
    pub up: bool,
    pub megabits_per_second: Option<u64>,
    /// True if the card supports RDMA, as the cards of a Spark's QSFP ports do.
    pub rdma: bool,
}

impl Network {
    pub(crate) fn gather() -> Result<Self, String> {
        let folder = fs::read_dir("/sys/class/net").map_err(|error| format!("/sys/class/net: {error}"))?;
        let mut cards = Vec::new();
        for path in folder.flatten().map(|entry| entry.path()).filter(|path| path.join("device").exists()) {
            let text = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
            cards.push(Card {
                name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                up: text("operstate").trim() == "up",
                // A card that is down reports -1.
                megabits_per_second: text("speed").trim().parse().ok(),
                rdma: path.join("device/infiniband").is_dir(),
            });
        }
        cards.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { cards: Some(cards) })
    }
}

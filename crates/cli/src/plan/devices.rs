//! `reef plan devices`: the devices that `--gpu` knows, with sources.

use reef_plan::device::{self, Arithmetic, Device, DeviceKind};
use serde_json::{Value, json};

use crate::{Common, output};

/// List the devices that `--gpu` knows
#[derive(clap::Args)]
pub struct Args {
    /// Show only devices whose name, vendor or architecture holds this text
    filter: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef plan devices`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let wanted = args.filter.unwrap_or_default().to_lowercase();
    let shown = device::devices().iter().filter(|device| {
        let names = [device.name, device.vendor, device.architecture];
        names.iter().any(|name| name.to_lowercase().contains(&wanted))
    });
    if args.common.json {
        return output::print_json(&shown.map(json_of).collect::<Vec<_>>());
    }
    let mut lines = vec![format!(
        "{:<22} {:>9} {:>8} {:>6} {:>6} {:>6} {:>6}  source (~ uncertain)",
        "device", "GiB", "GB/s", "bf16", "fp8", "int8", "fp4"
    )];
    lines.extend(shown.map(line_of));
    output::print_line(&lines.join("\n"))
}

fn tera(device: &Device, arithmetic: Arithmetic) -> Option<f64> {
    device.native_peak(arithmetic).map(|peak| peak / 1e12)
}

fn line_of(device: &Device) -> String {
    let peak = |arithmetic| match tera(device, arithmetic) {
        Some(peak) if peak >= 100.0 => format!("{peak:.0}"),
        Some(peak) => format!("{peak:.1}"),
        None => "-".into(),
    };
    let uncertain = match device.uncertain.is_empty() {
        true => String::new(),
        false => format!(" (~ {})", device.uncertain.join(", ")),
    };
    format!(
        "{:<22} {:>9.2} {:>8.0} {:>6} {:>6} {:>6} {:>6}  {}{uncertain}",
        device.name,
        device.memory_bytes / (1_u64 << 30) as f64,
        device.bandwidth_bytes_s / 1e9,
        peak(Arithmetic::Bf16),
        peak(Arithmetic::Fp8),
        peak(Arithmetic::Int8),
        peak(Arithmetic::Fp4),
        device.source
    )
}

fn json_of(device: &Device) -> Value {
    json!({
        "name": device.name,
        "aliases": device.aliases,
        "vendor": device.vendor,
        "architecture": device.architecture,
        "kind": match device.kind {
            DeviceKind::Gpu => "gpu",
            DeviceKind::Unified => "unified",
            DeviceKind::Cpu => "cpu",
        },
        "memory_bytes": device.memory_bytes,
        "memory_is_printed": device.memory_is_printed,
        "bandwidth_bytes_s": device.bandwidth_bytes_s,
        "peak_tflop_s": {
            "bf16": tera(device, Arithmetic::Bf16),
            "fp8": tera(device, Arithmetic::Fp8),
            "int8": tera(device, Arithmetic::Int8),
            "fp4": tera(device, Arithmetic::Fp4),
        },
        "cache_bytes": device.cache_bytes,
        "host_link_bytes_s": device.host_link_bytes_s,
        "peer_link_bytes_s": device.peer_link_bytes_s,
        "peers_max": device.peers_max,
        "source": device.source,
        "uncertain": device.uncertain,
    })
}

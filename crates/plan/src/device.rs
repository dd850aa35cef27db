//! Devices: what a GPU or CPU has, from `devices.csv`, each row with its source.

use std::sync::OnceLock;

/// The table; its head explains the columns.
const TABLE: &str = include_str!("devices.csv");
const COLUMNS: usize = 18;
const GIB: f64 = (1_u64 << 30) as f64;

/// Where a device's memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Memory of its own, behind a link to the host.
    Gpu,
    /// A GPU that shares the host's memory.
    Unified,
    /// A CPU and its main memory.
    Cpu,
}

/// Number formats that arithmetic units work in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// bfloat16 or float16 with 32-bit accumulation.
    Bf16,
    /// 8-bit float.
    Fp8,
    /// 8-bit integers.
    Int8,
    /// 4-bit float with block scales.
    Fp4,
}

/// A device as its data sheet and the engines' logs describe it.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The name that [`find`] prints.
    pub name: &'static str,
    /// Other names.
    pub aliases: Vec<&'static str>,
    /// Who makes it.
    pub vendor: &'static str,
    /// Generation.
    pub architecture: &'static str,
    /// Where its memory lives.
    pub kind: DeviceKind,
    /// Total memory in bytes, as engines print it.
    pub memory_bytes: f64,
    /// Whether the memory was read in logs; else it is the data sheet's, less a usual loss.
    pub memory_is_printed: bool,
    /// Peak memory bandwidth in bytes/s.
    pub bandwidth_bytes_s: f64,
    /// Last-level cache on the device, in bytes.
    pub cache_bytes: f64,
    /// Link to host memory, one direction, in bytes/s.
    pub host_link_bytes_s: f64,
    /// Link to the other devices of a group, one direction, in bytes/s; `None` = over the host link.
    pub peer_link_bytes_s: Option<f64>,
    /// Devices that such links join.
    pub peers_max: usize,
    /// Where the numbers are from.
    pub source: &'static str,
    /// Columns that no data sheet states plainly.
    pub uncertain: Vec<&'static str>,
    /// Dense peak in operations/s: bf16, fp8, int8, fp4.
    peaks: [Option<f64>; 4],
}

impl Device {
    /// Dense peak in operations/s of units that work in `arithmetic`; `None` = it has none.
    pub fn native_peak(&self, arithmetic: Arithmetic) -> Option<f64> {
        self.peaks[arithmetic as usize]
    }

    /// Dense peak in operations/s for numbers stored in `arithmetic`: its own units', else those of the
    /// next wider format, to which kernels decode (fp4 -> fp8 -> bf16, int8 -> bf16).
    pub fn peak(&self, arithmetic: Arithmetic) -> f64 {
        let wider = match arithmetic {
            Arithmetic::Fp4 => Some(Arithmetic::Fp8),
            Arithmetic::Fp8 | Arithmetic::Int8 => Some(Arithmetic::Bf16),
            Arithmetic::Bf16 => None,
        };
        match (self.native_peak(arithmetic), wider) {
            (Some(peak), _) => peak,
            (None, Some(wider)) => self.peak(wider),
            (None, None) => 0.0, // a test holds that every row has bf16
        }
    }

    /// Link between the devices of a group, one direction, in bytes/s.
    pub fn link_bytes_s(&self) -> f64 {
        self.peer_link_bytes_s.unwrap_or(self.host_link_bytes_s)
    }
}

/// No device has the name, or several may be meant.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("--gpu `{name}`: {why}; known are for example {examples} (`reef plan devices` lists all)")]
pub struct UnknownDevice {
    /// The name asked for.
    pub name: String,
    why: &'static str,
    examples: String,
}

/// Every device of the table, in its order.
pub fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        lines.skip(1).map(parse).collect()
    })
}

/// The device that `name` means. Case, spaces, `-`, `_` and the words `NVIDIA`, `GeForce`, `AMD`, `Intel`,
/// `Apple`, `Tesla` do not matter; an unambiguous part of a name will do.
pub fn find(name: &str) -> Result<&'static Device, UnknownDevice> {
    let wanted = plain(name);
    let names = |device: &Device| {
        std::iter::once(device.name).chain(device.aliases.iter().copied()).map(plain).collect()
    };
    let matching = |test: &dyn Fn(&String) -> bool| -> Vec<&'static Device> {
        let has = |device: &&Device| -> bool {
            let names: Vec<String> = names(device);
            names.iter().any(test)
        };
        devices().iter().filter(has).collect()
    };
    let error = |why, near: &[&Device]| {
        let known: Vec<&str> = near.iter().take(6).map(|device| device.name).collect();
        UnknownDevice { name: name.to_string(), why, examples: known.join(", ") }
    };
    let usual = ["RTX-3090", "RTX-4090", "L40S", "A100-80GB", "H100-SXM", "MI300X"];
    let usual: Vec<&Device> = devices().iter().filter(|d| usual.contains(&d.name)).collect();
    if wanted.is_empty() {
        return Err(error("an empty name", &usual));
    }
    if let [device] = matching(&|known| *known == wanted)[..] {
        return Ok(device);
    }
    match &matching(&|known| known.contains(&wanted))[..] {
        [device] => Ok(device),
        [] => Err(error("no such device", &usual)),
        several => Err(error("it may mean several devices", several)),
    }
}

/// A name without what people write differently.
fn plain(name: &str) -> String {
    let lower = name.to_lowercase();
    let words = lower.split([' ', '-', '_']).filter(|word| {
        !["nvidia", "geforce", "amd", "intel", "apple", "tesla", "radeon", "instinct"]
            .contains(word)
    });
    words.collect()
}

fn parse(line: &'static str) -> Device {
    let fields: Vec<&'static str> = line.split(',').collect();
    assert_eq!(fields.len(), COLUMNS, "devices.csv: {line}");
    let list = |at: usize| fields[at].split('|').filter(|part| !part.is_empty()).collect();
    let number = |at: usize| fields[at].parse::<f64>().ok();
    let required = |at: usize| number(at).unwrap_or_else(|| panic!("devices.csv: {line}"));
    let tera = |at: usize| number(at).map(|peak| peak * 1e12);
    Device {
        name: fields[0],
        aliases: list(1),
        vendor: fields[2],
        architecture: fields[3],
        kind: match fields[4] {
            "cpu" => DeviceKind::Cpu,
            "unified" => DeviceKind::Unified,
            _ => DeviceKind::Gpu,
        },
        memory_bytes: required(5) * GIB,
        memory_is_printed: fields[6] == "printed",
        bandwidth_bytes_s: required(7) * 1e9,
        peaks: [tera(8), tera(9), tera(10), tera(11)],
        cache_bytes: required(12) * 1024.0 * 1024.0,
        host_link_bytes_s: required(13) * 1e9,
        peer_link_bytes_s: number(14).map(|link| link * 1e9),
        peers_max: required(15) as usize,
        source: fields[16],
        uncertain: list(17),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_whole_and_plausible() {
        let header = TABLE.lines().find(|line| line.starts_with("name,")).unwrap();
        let columns: Vec<&str> = header.split(',').collect();
        assert_eq!(columns.len(), COLUMNS);
        assert!(devices().len() >= 60);
        for device in devices() {
            assert!(device.native_peak(Arithmetic::Bf16).is_some(), "{}", device.name);
            assert!(!device.source.is_empty(), "{}", device.name);
            assert!(
                device.uncertain.iter().all(|field| columns.contains(field)),
                "{}",
                device.name
            );
            // Between a small CPU and the widest accelerator: 3 to 1,900 operations a byte at bf16.
            let ridge = device.peak(Arithmetic::Bf16) / device.bandwidth_bytes_s;
            assert!((3.0..1900.0).contains(&ridge), "{} {ridge}", device.name);
            assert!(
                device.peak(Arithmetic::Fp4) >= device.peak(Arithmetic::Bf16),
                "{}",
                device.name
            );
            // Memory that logs did not show is said to be uncertain.
            let known = device.memory_is_printed || device.uncertain.contains(&"memory_gib");
            assert!(known, "{}", device.name);
        }
    }

    #[test]
    fn names_are_found_however_people_write_them() {
        for (written, name) in [
            ("NVIDIA GeForce RTX 4090", "RTX-4090"),
            ("rtx_4090", "RTX-4090"),
            ("4090", "RTX-4090"),
            ("h100", "H100-SXM"),
            ("NVIDIA H100 80GB HBM3", "H100-SXM"),
            ("H100 NVL", "H100-NVL"),
            ("a100", "A100-80GB"),
            ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
            ("AMD Instinct MI300X", "MI300X"),
            ("NVIDIA GB10", "GB10"),
            ("spark", "GB10"),
            ("L40", "L40"),
            ("RTX PRO 6000 Blackwell Server", "RTX-PRO-6000"),
        ] {
            assert_eq!(find(written).map(|device| device.name), Ok(name), "{written}");
        }
    }

    #[test]
    fn every_name_finds_its_own_row() {
        for device in devices() {
            for name in std::iter::once(&device.name).chain(&device.aliases) {
                assert_eq!(find(name).map(|found| found.name), Ok(device.name), "{name}");
            }
        }
    }

    #[test]
    fn a_wrong_name_is_answered_with_names() {
        let several = find("Jetson").unwrap_err().to_string();
        assert!(several.contains("several") && several.contains("Jetson-Thor"), "{several}");
        let none = find("Voodoo 2").unwrap_err().to_string();
        assert!(none.contains("no such device") && none.contains("H100"), "{none}");
        assert!(find(" - ").is_err());
    }

    #[test]
    fn totals_are_those_of_start_up_logs() {
        // planner/cases.csv: C024 79.15, C005 79.22, C003 22.07, C001 23.58, C065 31.4.
        for (name, gib) in
            [("A100", 79.15), ("H100", 79.22), ("L4", 22.07), ("RTX 3090", 23.58), ("5090", 31.4)]
        {
            let found = find(name).unwrap().memory_bytes / GIB;
            assert!((found - gib).abs() < 0.1, "{name}: {found}");
        }
    }

    #[test]
    fn a_device_without_units_for_a_format_decodes_to_the_next() {
        let a100 = find("A100").unwrap();
        assert_eq!(a100.native_peak(Arithmetic::Fp8), None);
        assert_eq!(a100.peak(Arithmetic::Fp4), 312e12);
        assert_eq!(find("H100").unwrap().peak(Arithmetic::Fp4), 1979e12);
    }
}

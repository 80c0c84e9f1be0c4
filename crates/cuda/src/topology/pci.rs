//! Where a GPU is on PCIe, as sysfs has it. Virtual machines hide much of it, so every field may be
//! unknown.

use super::root::Root;
use serde::{Deserialize, Serialize};

/// A PCI device's link and its place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciPlace {
    /// Its address, such as `0000:1b:00.0`.
    pub address: String,
    /// Generation that the link runs at now. Some GPUs lower it while they are idle.
    pub generation: Option<u8>,
    /// Generation that the device is capable of.
    pub most_generation: Option<u8>,
    /// Lanes that the link has.
    pub lanes: Option<u8>,
    /// Lanes that the device is capable of.
    pub most_lanes: Option<u8>,
    /// The bridges between the device and the processor, the one at the processor first. Empty
    /// where it is plugged in there directly, as in many virtual machines.
    pub bridges: Option<Vec<String>>,
    /// The NUMA node that it is plugged in at.
    pub numa_node: Option<u16>,
    /// How the IOMMU treats it: `identity`, or `DMA` where it translates every address.
    pub iommu: Option<String>,
}

impl PciPlace {
    /// Reads the files of the device at `address`.
    pub fn read(root: &Root, address: &str) -> PciPlace {
        let folder = format!("sys/bus/pci/devices/{address}");
        let file = |name: &str| root.text(&format!("{folder}/{name}"));
        let lanes = |name: &str| file(name)?.parse().ok().filter(|lanes| *lanes != 0);
        PciPlace {
            address: address.into(),
            generation: file("current_link_speed").as_deref().and_then(generation),
            most_generation: file("max_link_speed").as_deref().and_then(generation),
            lanes: lanes("current_link_width"),
            most_lanes: lanes("max_link_width"),
            bridges: bridges(root, &folder),
            // -1 where the firmware does not say.
            numa_node: file("numa_node").and_then(|node| node.parse().ok()),
            iommu: file("iommu_group/type"),
        }
    }

    /// Where the device, and every other below the same port, is connected to the processor.
    pub fn port(&self) -> Option<&str> {
        self.bridges.as_ref()?.first().map(String::as_str)
    }
}

/// The bridges above a device: the parts of its real path that are PCI addresses, but for the last,
/// which is itself.
fn bridges(root: &Root, folder: &str) -> Option<Vec<String>> {
    let path = root.real(folder)?;
    let mut addresses: Vec<String> = path
        .iter()
        .filter_map(|part| part.to_str())
        .filter(|part| is_address(part))
        .map(String::from)
        .collect();
    addresses.pop()?;
    Some(addresses)
}

/// Whether a name is `domain:bus:device.function`.
fn is_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4
        && parts.iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The generation of a speed such as `32.0 GT/s PCIe`.
fn generation(speed: &str) -> Option<u8> {
    match speed.split_whitespace().next()? {
        "2.5" => Some(1),
        "5.0" | "5" => Some(2),
        "8.0" | "8" => Some(3),
        "16.0" | "16" => Some(4),
        "32.0" | "32" => Some(5),
        "64.0" | "64" => Some(6),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// A device below the bridges of `path`, with files that say what they are given.
    fn device(root: &Path, path: &str, files: &[(&str, &str)]) {
        let at = root.join("sys/devices/pci0000:15").join(path);
        fs::create_dir_all(&at).unwrap();
        for (name, text) in files {
            fs::create_dir_all(at.join(name).parent().unwrap()).unwrap();
            fs::write(at.join(name), text).unwrap();
        }
        let devices = root.join("sys/bus/pci/devices");
        fs::create_dir_all(&devices).unwrap();
        symlink(&at, devices.join(at.file_name().unwrap())).unwrap();
    }

    #[test]
    fn a_device_behind_a_switch_has_its_bridges_the_processors_first() {
        let tree = tempfile::tempdir().unwrap();
        let files = [
            ("current_link_speed", "16.0 GT/s PCIe\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("current_link_width", "8\n"),
            ("max_link_width", "16\n"),
            ("numa_node", "1\n"),
            ("iommu_group/type", "identity\n"),
        ];
        device(tree.path(), "0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", &files);
        let place = PciPlace::read(&Root::new(tree.path()), "0000:18:00.0");
        let expected = PciPlace {
            address: "0000:18:00.0".into(),
            generation: Some(4),
            most_generation: Some(5),
            lanes: Some(8),
            most_lanes: Some(16),
            bridges: Some(vec!["0000:15:01.0".into(), "0000:16:00.0".into(), "0000:17:00.0".into()]),
            numa_node: Some(1),
            iommu: Some("identity".into()),
        };
        assert_eq!(place, expected);
        assert_eq!(place.port(), Some("0000:15:01.0"));
    }

    #[test]
    fn what_a_virtual_machine_hides_is_unknown() {
        let tree = tempfile::tempdir().unwrap();
        let files =
            [("numa_node", "-1\n"), ("current_link_speed", "Unknown\n"), ("current_link_width", "0\n")];
        device(tree.path(), "0000:00:04.0", &files);
        let place = PciPlace::read(&Root::new(tree.path()), "0000:00:04.0");
        let expected =
            PciPlace { address: "0000:00:04.0".into(), bridges: Some(vec![]), ..PciPlace::default() };
        assert_eq!(place, expected);
        assert_eq!(place.port(), None);
        let absent = PciPlace::read(&Root::new(tree.path()), "0000:00:05.0");
        assert_eq!(absent.bridges, None);
    }
}

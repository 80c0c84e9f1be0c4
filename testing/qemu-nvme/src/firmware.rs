//! The guest's firmware, assembled when it is needed. It knows binutils, and nothing of what the
//! firmware does.

use crate::Error;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = include_str!("mailbox.S");

/// The image that the guest's processor starts.
pub(crate) fn image() -> Result<Vec<u8>, Error> {
    let folder = tempfile::tempdir().map_err(Error::io("no folder to assemble the firmware in"))?;
    let [source, object, image] =
        ["mailbox.S", "mailbox.o", "mailbox.bin"].map(|name| folder.path().join(name));
    std::fs::write(&source, SOURCE).map_err(Error::io("writing the firmware's source"))?;
    run(Command::new("as").arg("--32").arg(&source).arg("-o").arg(&object))?;
    run(Command::new("objcopy").args(["-O", "binary", "-j", ".text"]).arg(&object).arg(&image))?;
    read(&image)
}

fn read(image: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(image).map_err(Error::io("reading the assembled firmware"))
}

fn run(command: &mut Command) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        // The assembler of another architecture does not know --32.
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(Error::Missing(format!("{program} of binutils cannot assemble for x86: {said}")))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::Missing(format!("{program} is not installed (Debian: binutils)")))
        }
        Err(source) => Err(Error::Io { what: format!("running {program}"), source }),
    }
}

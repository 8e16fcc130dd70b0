//! `warpwire completions` and `warpwire man`: files for the shell, made from the definitions of the
//! command line.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::output::{self, Failure};

/// Print completions for a shell
#[derive(Args)]
#[command(after_help = COMPLETIONS)]
pub(crate) struct CompletionArguments {
    /// The shell
    shell: Shell,
}

const COMPLETIONS: &str = "\
Examples:
  # bash, for this user, from the next shell on
  warpwire completions bash > ~/.local/share/bash-completion/completions/warpwire
  # zsh, in a folder of $fpath
  warpwire completions zsh > ~/.zfunc/_warpwire
  warpwire completions fish > ~/.config/fish/completions/warpwire.fish";

/// Print the man page, or write those of all commands to a folder
#[derive(Args)]
#[command(after_help = MAN)]
pub(crate) struct ManArguments {
    /// Folder for warpwire.1, warpwire-perf.1 and so on; created if it does not exist
    folder: Option<PathBuf>,
}

const MAN: &str = "\
Examples:
  warpwire man | man -l -                     read the page
  warpwire man ~/.local/share/man/man1        for man warpwire-perf";

pub(crate) fn completions(
    arguments: &CompletionArguments,
    mut command: Command,
) -> Result<ExitCode, String> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "warpwire", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn man(arguments: &ManArguments, command: Command) -> Result<ExitCode, String> {
    output::exit_result(print_man(arguments, command))
}

fn print_man(arguments: &ManArguments, mut command: Command) -> Result<ExitCode, Failure> {
    command.build();
    match &arguments.folder {
        None => {
            output::print(&page(&command)?).map_err(Failure::Runtime)?;
        }
        Some(folder) => {
            let failed = |why: std::io::Error| {
                Failure::Runtime(format!("cannot write to {}: {why}", folder.display()))
            };
            std::fs::create_dir_all(folder).map_err(failed)?;
            let count = write_pages(&command, folder)?;
            let text = format!("{count} pages in {}\n", folder.display());
            output::print(&text).map_err(Failure::Runtime)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of a command and of all below it; returns their number.
fn write_pages(command: &Command, folder: &Path) -> Result<usize, Failure> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let path = folder.join(format!("{name}.1"));
    std::fs::write(&path, page(command)?)
        .map_err(|why| Failure::Runtime(format!("cannot write {}: {why}", path.display())))?;
    let mut count = 1;
    let below = command.get_subcommands();
    for one in below.filter(|one| !one.is_hide_set() && one.get_name() != "help") {
        count += write_pages(one, folder)?;
    }
    Ok(count)
}

fn page(command: &Command) -> Result<String, Failure> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone())
        .manual("Warpwire")
        .source(concat!("warpwire ", env!("CARGO_PKG_VERSION")))
        .render(&mut text)
        .map_err(|why| Failure::Runtime(format!("cannot write a man page: {why}")))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

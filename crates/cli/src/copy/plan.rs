//! `warpwire copy plan`

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use warpwire::mem::copy::Plan;

use super::target::DeviceChoice;
use super::{Failure, Screen};

/// Show which way a copy takes, by size and direction
///
/// Measured once per device in well under a second, kept in the user's cache folder, and looked up by every
/// copy since. `WARPWIRE_COPY` sets it by hand.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// Measure anew, and keep that
    #[arg(long)]
    recalibrate: bool,

    /// Print JSON: {"device": …, "plan": …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy plan
  warpwire copy plan --recalibrate                      after a change of driver or processor
  WARPWIRE_COPY=write=64KiB,read=512 warpwire copy plan";

#[derive(Serialize)]
struct Shown<'a> {
    device: String,
    plan: &'a Plan,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (device, no_cuda) = arguments.device.open()?;
    let screen = Screen::new(arguments.json);
    screen.working("measuring");
    let plan = match arguments.recalibrate {
        true => std::sync::Arc::new(Plan::recalibrate(&device)?),
        false => Plan::for_device(&device).map_err(|error| match error.kind() {
            warpwire::error::Kind::Malformed => Failure::Usage(error.to_string()),
            _ => error.into(),
        })?,
    };
    screen.say(&format!("# copy plan of {} ({})\n", device.label(), device.info().name))?;
    if let Some(why) = no_cuda {
        screen.say(&format!("# no CUDA device: {why}\n"))?;
    }
    screen.say(&plan.to_string())?;
    screen.finish(&Shown { device: device.label(), plan: &plan })?;
    Ok(ExitCode::SUCCESS)
}

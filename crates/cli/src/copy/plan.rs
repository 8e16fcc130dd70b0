//! `warpwire copy plan`: the copy method by size and direction.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use warpwire::mem::copy::CopyPlan;

use super::target::DeviceChoice;
use super::{Failure, Reporter};

/// Show which method copies use, by size and direction
///
/// The plan is measured once per device, in well under a second, saved in the user's cache
/// directory, and used by every copy. WARPWIRE_COPY overrides it.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// Measure again, and save the result
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
struct PlanReport<'a> {
    device: String,
    plan: &'a CopyPlan,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (device, no_cuda) = arguments.device.open()?;
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.set_status("measuring");
    let plan = match arguments.recalibrate {
        true => std::sync::Arc::new(CopyPlan::recalibrate(&device)?),
        false => CopyPlan::for_device(&device).map_err(|error| match error.kind() {
            warpwire::error::Kind::Malformed => Failure::Usage(error.to_string()),
            _ => error.into(),
        })?,
    };
    reporter.print(&format!("# copy plan of {} ({})\n", device.label(), device.info().name))?;
    if let Some(why) = no_cuda {
        reporter.print(&format!("# no CUDA device: {why}\n"))?;
    }
    reporter.print(&plan.to_string())?;
    reporter.print("# used: by the rules above; single times waver, and may say otherwise\n")?;
    reporter.finish(&PlanReport { device: device.label(), plan: &plan })?;
    Ok(ExitCode::SUCCESS)
}

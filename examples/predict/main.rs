#![forbid(unsafe_code)]

#[path = "../gpt/cli.rs"]
#[allow(dead_code, reason = "the sizes alone are used")]
mod cli;
#[path = "../gpt/model.rs"]
#[allow(dead_code, reason = "nothing is sampled")]
mod gpt;
#[path = "../crossasset/model.rs"]
#[allow(dead_code, reason = "nothing is reported")]
mod crossasset;
#[path = "../shared/mod.rs"]
mod shared;
mod attention;
mod bench;
mod cache;
mod clock;
mod code;
mod gpu;
#[path = "../../benches/matmul/case.rs"]
#[allow(dead_code)]
mod matmul_product;
mod product;
mod step;
mod stream;
mod work;

mod dataset { pub(crate) const CLASSES: usize = 3; }
mod features {
    pub(crate) const SCALES: [usize; 12] = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233];
    pub(crate) const FEATURES: usize = 193;
}
mod against;
mod forecast;
use std::collections::BTreeMap;
fn main() {
    let gpu = gpu::Gpu::H200;
    let a: Vec<String> = std::env::args().collect();
    let lines = against::all(std::path::Path::new("benches/runs"), gpu.processors).unwrap();
    let kernels = code::Kernels::of(gpu.arch);
    let mut by: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for line in &lines {
        if a.len() > 1 && !format!("{} {}", line.group, line.name).contains(&a[1]) { continue }
        let (rows, total) = forecast::forecast(&gpu, &kernels, &line.launches, line.calls);
        let error = total / line.measured_us - 1.0;
        by.entry(line.group).or_default().push(error);
        println!("{:10} {:45} {:10.2} {:10.2} {:+6.1} %  {}", line.group, line.name, total, line.measured_us, 100.0 * error, rows[0].1.bound);
        if a.len() > 2 { for (n, r) in rows { println!("      {n:32} x{:4} {:10.2} us {:8.1} MB {}", r.launches, r.us, r.bytes / 1e6, r.bound); } }
    }
    for (g, mut e) in by {
        let all = e.len(); let w = |l: f64| e.iter().filter(|e| e.abs() <= l).count();
        println!("{g}: {all} lines, within 10 %: {}, 20 %: {}", w(0.1), w(0.2));
        e.sort_by(f64::total_cmp);
        println!("   median {:.3} min {:.3} max {:.3}", e[all/2], e[0], e[all-1]);
    }
}

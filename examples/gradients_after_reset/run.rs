//! The results of a training run by batch, and the comparison of two runs by bits.

/// Losses, gradients and weights of each batch.
#[derive(Default)]
pub(crate) struct Run {
    pub(crate) losses: Vec<f32>,
    pub(crate) gradients: Vec<Vec<f32>>,
    pub(crate) weights: Vec<Vec<f32>>,
    /// The L2 norms of the head's gradient.
    pub(crate) head_l2: Vec<f64>,
}

impl Run {
    /// Adds a batch.
    pub(crate) fn push(&mut self, loss: f32, gradients: Vec<f32>, weights: Vec<f32>, head: &[f32]) {
        self.losses.push(loss);
        self.gradients.push(gradients);
        self.weights.push(weights);
        self.head_l2.push(l2(head));
    }

    /// Returns the batches whose loss, gradients or weights differ in bits from `other`'s.
    ///
    /// # Panics
    /// When the runs have different numbers of batches.
    pub(crate) fn differences(&self, other: &Self) -> Vec<usize> {
        assert_eq!(self.losses.len(), other.losses.len());
        (0..self.losses.len())
            .filter(|&batch| {
                self.losses[batch].to_bits() != other.losses[batch].to_bits()
                    || !same(&self.gradients[batch], &other.gradients[batch])
                    || !same(&self.weights[batch], &other.weights[batch])
            })
            .collect()
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Returns the L2 norm.
pub(crate) fn l2(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// Prints the L2 norm of the head's gradient by batch.
pub(crate) fn print_table(columns: &[(&str, &Run)]) {
    println!("{:>8}{}", "batch", columns.iter().map(|(name, _)| format!("{name:>26}")).collect::<String>());
    for batch in 0..columns[0].1.head_l2.len() {
        let row = columns.iter().map(|(_, run)| format!("{:>26.6e}", run.head_l2[batch])).collect::<String>();
        println!("{batch:>8}{row}");
    }
}

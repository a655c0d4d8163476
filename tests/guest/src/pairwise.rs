//! A few points of a large matrix, such that each pair of values occurs in one of them.
//!
//! Most faults that a combination causes are caused by two of its values; a dozen points find those where the whole
//! matrix has hundreds.

/// Every point of a matrix whose axes have `sizes` values.
pub(crate) fn all(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut points = vec![Vec::new()];
    for &size in sizes {
        points =
            points.iter().flat_map(|point| (0..size).map(move |v| [&point[..], &[v]].concat())).collect();
    }
    points
}

/// Points chosen greedily and deterministically: each next one covers most of the remaining pairs.
pub(crate) fn pairs(sizes: &[usize]) -> Vec<Vec<usize>> {
    let candidates = all(sizes);
    let mut open: Vec<_> = candidates.iter().flat_map(|point| pairs_of(point)).collect();
    open.sort_unstable();
    open.dedup();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let covers =
            |point: &&Vec<usize>| pairs_of(point).filter(|pair| open.binary_search(pair).is_ok()).count();
        // Of equal points, the first: the order of values is the order of preference.
        let best = candidates.iter().rev().max_by_key(covers).expect("a matrix has points");
        open.retain(|pair| !pairs_of(best).any(|covered| covered == *pair));
        chosen.push(best.clone());
    }
    chosen
}

/// The pairs of (axis, value) that occur in a point.
fn pairs_of(point: &[usize]) -> impl Iterator<Item = [(usize, usize); 2]> {
    (0..point.len()).flat_map(move |b| (0..b).map(move |a| [(a, point[a]), (b, point[b])]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_meets_in_few_points() {
        let sizes = [3, 3, 2, 2, 2, 2];
        let chosen = pairs(&sizes);
        for point in all(&sizes) {
            for pair in pairs_of(&point) {
                assert!(chosen.iter().any(|point| pairs_of(point).any(|met| met == pair)), "{pair:?}");
            }
        }
        assert!(chosen.len() <= 12, "{}", chosen.len());
        assert_eq!(all(&sizes).len(), 144);
    }
}

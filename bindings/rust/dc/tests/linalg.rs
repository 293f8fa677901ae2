//! Operators on matrices: results have the properties that define them, and arguments that do not fit are errors.

mod common;

use common::{close, identity, linalg, noise, product, transpose};
use dc::{Bf16, Linalg, Negative, Polynomial, SpectralOptions, Status, Symmetry, Tensor};

/// X X^T + I with n rows.
fn positive(seed: u64, n: usize) -> Vec<f64> {
    let x = noise(seed, n * n);
    product(&x, &transpose(&x, n), n).iter().zip(identity(n)).map(|(x, one)| x + one).collect()
}

#[test]
fn eigenvectors_make_a_matrix_diagonal() {
    let (a, options) = (positive(1, 6), SpectralOptions::default());
    let (values, vectors) = linalg().eigh(&Tensor::new(&a, &[6, 6]).unwrap(), &options).unwrap();
    let turned = product(&product(&transpose(&vectors, 6), &a, 6), &vectors, 6);
    let diagonal: Vec<f64> = identity(6).iter().enumerate().map(|(at, one)| one * values[at / 6]).collect();
    close(&turned, &diagonal, 1e-12);
    assert!(values.windows(2).all(|pair| pair[0] <= pair[1]));
    let (mut other, _) = linalg().eigh(&Tensor::new(&a, &[1, 6, 6]).unwrap(), &options.descending(true)).unwrap();
    other.reverse();
    close(&other, &values, 1e-12);
    let endless = Tensor::new(&[0.0f64; 0], &[0, i64::MAX, i64::MAX]).unwrap().transposed();
    assert_eq!(linalg().eigh(&endless, &options).unwrap_err().status(), Status::SHAPE);
    let none: (Vec<f32>, Vec<f32>) = linalg().eigh(&Tensor::new(&[], &[0, 3, 3]).unwrap(), &options).unwrap();
    assert_eq!(none, (vec![], vec![]));
}

#[test]
fn powers_of_a_root_times_the_matrix_are_the_identity() {
    let batch = [positive(2, 5), positive(3, 5)].concat();
    let a = Tensor::new(&batch, &[2, 5, 5]).unwrap();
    let options = SpectralOptions::default().eps_abs(0.25);
    for root in 1..=4 {
        let roots = linalg().inverse_root(&a, root, &options).unwrap();
        let powers = linalg().matrix_power(&a, -1.0 / f64::from(root), &options).unwrap();
        close(&roots, &powers, 1e-12);
        for (matrix, root_of) in batch.chunks(25).zip(roots.chunks(25)) {
            let raised: Vec<f64> = matrix.iter().zip(identity(5)).map(|(x, one)| x + 0.25 * one).collect();
            close(&(0..root).fold(raised, |left, _| product(&left, root_of, 5)), &identity(5), 1e-11);
        }
    }
}

#[test]
fn matrices_become_orthogonal_by_products() {
    let (a, linalg) = (noise(4, 3 * 7), linalg());
    let wide = Tensor::new(&a, &[3, 7]).unwrap();
    let orthogonal = linalg.orthogonalize(&wide, Polynomial::Express, 8).unwrap();
    close(&product(&orthogonal, &transpose(&orthogonal, 7), 7), &identity(3), 1e-9);
    let tall = linalg.orthogonalize(&wide.transposed(), Polynomial::Express, 8).unwrap();
    assert_eq!(transpose(&tall, 3), orthogonal); // the same bits
}

#[test]
fn kronecker_products_are_those_of_the_definition() {
    let (a, b, x) = (noise(5, 6), noise(6, 20), noise(7, 2 * 15));
    let (left, right) = (Tensor::new(&a, &[2, 3]).unwrap(), Tensor::new(&b, &[4, 5]).unwrap());
    let kron = linalg().kron(&left, &right).unwrap();
    let element = |i: usize, j: usize| a[i / 4 * 3 + j / 5] * b[i % 4 * 5 + j % 5];
    assert_eq!(kron, (0..8 * 15).map(|at| element(at / 15, at % 15)).collect::<Vec<f64>>());
    let applied = linalg().kron_apply(&left, &right, &Tensor::new(&x, &[2, 3, 5]).unwrap()).unwrap();
    for (out, x) in applied.chunks(8).zip(x.chunks(15)) {
        close(out, &product(&kron, x, 15), 1e-13);
    }
}

#[test]
fn products_of_batches_transposed_and_of_16_bits() {
    let (a, b, linalg) = (noise(8, 2 * 12), noise(9, 20), linalg());
    let batch = Tensor::new(&a, &[2, 3, 4]).unwrap();
    let expected: Vec<f64> = a.chunks(12).flat_map(|matrix| product(matrix, &b, 4)).collect();
    close(&linalg.batch_matmul(&batch, &Tensor::new(&b, &[4, 5]).unwrap()).unwrap(), &expected, 1e-13);
    let other = transpose(&b, 5);
    let seen = Tensor::new(&other, &[5, 4]).unwrap().transposed();
    assert_eq!((seen.shape(), seen.data()), (&[4, 5][..], &other[..]));
    close(&linalg.batch_matmul(&batch, &seen).unwrap(), &expected, 1e-13);
    let turned: Vec<f64> = a.chunks(12).flat_map(|matrix| product(&transpose(matrix, 4), matrix, 3)).collect();
    close(&linalg.batch_matmul(&batch.transposed(), &batch).unwrap(), &turned, 1e-13);
    assert_eq!(batch.transposed().transposed().shape(), batch.shape());
    close(&linalg.batch_matmul(&batch, &batch.transposed().transposed().transposed()).unwrap(), &squares(&a), 1e-13);
    let halves = [Bf16(0x3f00), Bf16(0x4000)]; // 0.5, 2
    let row = Tensor::new(&halves, &[1, 2]).unwrap();
    assert_eq!(linalg.batch_matmul(&row, &row.transposed()).unwrap(), [Bf16(0x4088)]);
    // 4.25
}

/// A A^T of each [3, 4] matrix.
fn squares(a: &[f64]) -> Vec<f64> {
    a.chunks(12).flat_map(|matrix| product(matrix, &transpose(matrix, 4), 4)).collect()
}

#[test]
fn a_handle_says_who_solves_and_moves_to_other_threads() {
    fn send<T: Send>(_: &T) {}
    let options = dc::LinalgOptions::default().plain(true);
    let linalg = Linalg::new(&dc::Device::open("cpu").unwrap(), &options).unwrap();
    send(&linalg);
    assert_eq!(linalg.solver(), "libdc");
    assert!(!linalg.as_ptr().is_null());
}

#[test]
fn errors_name_the_fault() {
    let (linalg, options) = (linalg(), SpectralOptions::default());
    let a = noise(10, 24);
    let (wide, cube) = (Tensor::new(&a, &[4, 6]).unwrap(), Tensor::new(&a, &[1, 2, 3, 4]).unwrap());
    let (row, number) = (Tensor::new(&a, &[24]).unwrap(), Tensor::new(&a[..1], &[]).unwrap());
    for wrong in [&wide, &cube, &row, &number] {
        assert_eq!(linalg.eigh(wrong, &options).unwrap_err().status(), Status::SHAPE);
        assert_eq!(linalg.inverse_root(wrong, 2, &options).unwrap_err().status(), Status::SHAPE);
    }
    for wrong in [&cube, &row, &number] {
        assert_eq!(linalg.orthogonalize(wrong, Polynomial::Express, 0).unwrap_err().status(), Status::SHAPE);
        assert_eq!(linalg.kron(wrong, &wide).unwrap_err().status(), Status::SHAPE);
        assert_eq!(linalg.kron_apply(wrong, &wide, &wide).unwrap_err().status(), Status::SHAPE);
        assert_eq!(linalg.batch_matmul(&wide, wrong).unwrap_err().status(), Status::SHAPE);
    }
    let error = linalg.eigh(&wide, &options).unwrap_err();
    assert!(error.text().contains("a is 4 by 6"), "{error}");
    let error = Tensor::new(&a, &[5, 5]).unwrap_err();
    assert!(error.text().contains("shape = [5, 5], must have the slice's 24 elements"), "{error}");
    let skew = Tensor::new(&[1.0, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    assert_eq!(linalg.eigh(&skew, &options).unwrap_err().status(), Status::NOT_SYMMETRIC);
    let lower = options.symmetry(Symmetry::Lower).negative(Negative::Clamp);
    let power = linalg.matrix_power(&skew, 2.0, &lower).unwrap(); // its negative eigenvalue counts as 0
    let (values, vectors) = linalg.eigh(&skew, &lower).unwrap();
    let (scale, column) = (values[1] * values[1], [vectors[1], vectors[3]]);
    close(&power, &product(&column, &column, 1).iter().map(|x| scale * x).collect::<Vec<_>>(), 1e-12);
    let error = linalg.inverse_root(&Tensor::new(&[-1.0], &[1, 1]).unwrap(), 2, &options).unwrap_err();
    assert_eq!(error.status(), Status::NOT_POSITIVE);
    let error = linalg.inverse_root(&Tensor::new(&[1.0], &[1, 1]).unwrap(), 65, &options).unwrap_err();
    assert!(error.text().contains("root = 65, must be 1 to 64"), "{error}");
    let error = linalg.orthogonalize(&wide, Polynomial::Muon, 65).unwrap_err();
    assert!(error.text().contains("steps = 65"), "{error}");
    let error = linalg.orthogonalize(&Tensor::new(&[f32::NAN; 4], &[2, 2]).unwrap(), Polynomial::Muon, 0).unwrap_err();
    assert_eq!(error.status(), Status::NOT_FINITE);
    assert_eq!(
        linalg
            .kron(&Tensor::new(&[1i32], &[1, 1]).unwrap(), &Tensor::new(&[1], &[1, 1]).unwrap())
            .unwrap_err()
            .status(),
        Status::DTYPE
    );
    let none = |rows, columns| Tensor::<f64>::new(&[], &[rows, columns]).unwrap();
    for long in [1 << 31, 1 << 40] {
        let error = linalg.batch_matmul(&none(long, 0), &none(0, long)).unwrap_err();
        assert!(error.status() == Status::NO_MEMORY && error.text().contains(&format!("[{long}, {long}]")), "{error}");
    }
    assert_eq!(linalg.kron(&none(i64::MAX, 0), &wide).unwrap_err().status(), Status::SHAPE);
}

package result

import "math"

// Welch is the probability that values as far above others as after are above before, or further, come from one distribution: the one-sided
// t-test of Welch, which lets the two have spreads of their own. Values should be logarithms where ratios are what counts. It takes two
// of each at the least; of less nothing can be said, which is 1.
func Welch(before, after []float64) float64 {
	if min(len(before), len(after)) < 2 {
		return 1
	}
	a, va := meanAndError(before)
	b, vb := meanAndError(after)
	if va+vb == 0 {
		switch {
		case b > a:
			return 0
		case b == a:
			return 0.5
		}
		return 1
	}
	freedom := (va + vb) * (va + vb) / (va*va/float64(len(before)-1) + vb*vb/float64(len(after)-1))
	return studentAbove((b-a)/math.Sqrt(va+vb), freedom)
}

// meanAndError is the mean, and the square of its standard error.
func meanAndError(values []float64) (mean, squared float64) {
	n := float64(len(values))
	for _, v := range values {
		mean += v / n
	}
	for _, v := range values {
		squared += (v - mean) * (v - mean) / (n - 1) / n
	}
	return mean, squared
}

// studentAbove is the probability that Student's t with that many degrees of freedom is above a value.
func studentAbove(t, freedom float64) float64 {
	half := incompleteBeta(freedom/(freedom+t*t), freedom/2, 0.5) / 2
	if t < 0 {
		return 1 - half
	}
	return half
}

// incompleteBeta is the regularised incomplete beta function. Its continued fraction converges fast on one side of the mean, and
// the other side is the complement.
func incompleteBeta(x, a, b float64) float64 {
	if x <= 0 || x >= 1 {
		return min(max(x, 0), 1)
	}
	if x > (a+1)/(a+b+2) {
		return 1 - incompleteBeta(1-x, b, a)
	}
	lgA, _ := math.Lgamma(a)
	lgB, _ := math.Lgamma(b)
	lgAB, _ := math.Lgamma(a + b)
	front := math.Exp(lgAB - lgA - lgB + a*math.Log(x) + b*math.Log1p(-x))
	// From the innermost term outwards; a hundred are more than double precision holds.
	fraction := 0.0
	for m := 100; m > 0; m-- {
		k := float64(m)
		even := k * (b - k) * x / ((a + 2*k - 1) * (a + 2*k))
		odd := -(a + k) * (a + b + k) * x / ((a + 2*k) * (a + 2*k + 1))
		fraction = even / (1 + odd/(1+fraction))
	}
	first := -(a + b) * x / (a + 1)
	return front / a / (1 + first/(1+fraction))
}

// Holm says which of several probabilities are so small that the chance of even one false finding among all of them stays below alpha.
func Holm(probabilities []float64, alpha float64) []bool {
	found := make([]bool, len(probabilities))
	for left := len(probabilities); left > 0; left-- {
		smallest := -1
		for i, p := range probabilities {
			if !found[i] && (smallest < 0 || p < probabilities[smallest]) {
				smallest = i
			}
		}
		if probabilities[smallest] > alpha/float64(left) {
			break
		}
		found[smallest] = true
	}
	return found
}

package result

// RankProbability is the exact probability, if before and after came from one distribution, that after would rank as high
// as it does or higher (the one-sided test of Mann and Whitney). Equal values count half each way, which errs on the side of noise.
func RankProbability(before, after []float64) float64 {
	// u counts pairs in which after is higher, twice.
	u := 0
	for _, a := range after {
		for _, b := range before {
			switch {
			case a > b:
				u += 2
			case a == b:
				u++
			}
		}
	}
	n, m := len(before), len(after)
	counts := arrangements(n, m)
	total, above := 0.0, 0.0
	for score, count := range counts {
		total += count
		if 2*score >= u-u%2 {
			above += count
		}
	}
	return above / total
}

// arrangements is in how many of the orders of n and m values each number of pairs has the second one higher.
func arrangements(n, m int) []float64 {
	// table[i][j] is that for i and j values: the highest of all is of the first kind, or it is of the second and above i others.
	table := make([][][]float64, n+1)
	for i := range table {
		table[i] = make([][]float64, m+1)
		for j := range table[i] {
			counts := make([]float64, i*j+1)
			if i == 0 || j == 0 {
				counts[0] = 1
			} else {
				for score, count := range table[i-1][j] {
					counts[score] += count
				}
				for score, count := range table[i][j-1] {
					counts[score+i] += count
				}
			}
			table[i][j] = counts
		}
	}
	return table[n][m]
}

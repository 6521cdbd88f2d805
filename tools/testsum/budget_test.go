package main

import (
	"os"
	"regexp"
	"strconv"
	"testing"
)

// wholeGate is what the gate may take on a cold machine of two cores, in seconds.
const wholeGate = 58 * 60

// Each stage of .ci/run has a budget in CONTRIBUTING's table, which it prints, and together they are what the gate may take.
func TestEachStageHasABudget(t *testing.T) {
	read := func(path string) string {
		text, err := os.ReadFile("../../" + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	budgets, sum := map[string]int{}, 0
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|.*\\| ([0-9]+) s \\|$").FindAllStringSubmatch(read("CONTRIBUTING.md"), -1) {
		if _, twice := budgets[row[1]]; twice {
			t.Errorf("%s has two rows", row[1])
		}
		seconds, err := strconv.Atoi(row[2])
		if err != nil {
			t.Fatal(err)
		}
		budgets[row[1]] = seconds
	}
	total := budgets["total"]
	delete(budgets, "total")
	for _, stage := range regexp.MustCompile(`(?m)^stage ([a-z-]+) `).FindAllStringSubmatch(read(".ci/run"), -1) {
		seconds, has := budgets[stage[1]]
		if !has {
			t.Errorf("stage %s has no budget", stage[1])
		}
		sum += seconds
		delete(budgets, stage[1])
	}
	for name := range budgets {
		t.Errorf("%s has a budget and is no stage", name)
	}
	if sum != total || total > wholeGate {
		t.Errorf("the stages have %d s, the table says %d s in all, and the gate may take %d s", sum, total, wholeGate)
	}
}

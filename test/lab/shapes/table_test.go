package shapes

import (
	"os"
	"strings"
	"testing"
)

// Where the classical network does otherwise, people can read why.
func TestDifferencesAreExplained(t *testing.T) {
	text, err := os.ReadFile("../../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range table {
		if (s.classical != nil) != (s.why != "") {
			t.Errorf("%s: differs and has no reason, or has one and does not differ", s.name)
		}
		if !strings.Contains(string(text), s.why) {
			t.Errorf("%s: ARCHITECTURE.md does not say that %s", s.name, s.why)
		}
	}
}

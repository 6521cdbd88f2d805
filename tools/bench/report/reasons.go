package report

import (
	_ "embed"
	"fmt"

	"sigs.k8s.io/yaml"
)

// reasonsFile is written by hand, after somebody has found out.
//
//go:embed reasons.yaml
var reasonsFile []byte

// finding is why a budget was missed, and of what that was found out: another miss may have another reason.
type finding struct {
	Why    string `json:"why"`
	Commit string `json:"commit"`
	Kernel string `json:"kernel"`
}

// unexplained stands where nobody has found out yet.
const unexplained = "not found out yet"

func (f finding) String() string {
	if f.Why == "" {
		return unexplained
	}
	return fmt.Sprintf("%s (found out at commit %s, Linux %s)", f.Why, short(f.Commit), f.Kernel)
}

// reasons are by budget's key. The file is part of the program, and a test reads it.
func reasons() map[string]finding {
	all, err := readReasons()
	if err != nil {
		panic(err)
	}
	return all
}

func readReasons() (all map[string]finding, err error) {
	return all, yaml.UnmarshalStrict(reasonsFile, &all)
}

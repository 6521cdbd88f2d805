package install

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Portmap is the file name of the plugin that opens host ports, and its type.
const Portmap = "portmap"

// versions are those of the CNI specification that the list offers, the oldest
// first, and usual is what a runtime takes that chooses none.
var versions = []string{"0.4.0", usual, "1.1.0"}

const usual = "1.0.0"

// Chained is somebody else's plugin in the list.
type Chained struct {
	// Version is the newest of the CNI specification that it is known to speak,
	// among those of our list.
	Version string
}

type (
	portmap struct {
		Type         string       `json:"type"`
		Capabilities portMappings `json:"capabilities"`
	}
	portMappings struct {
		PortMappings bool `json:"portMappings"`
	}
)

// restrict leaves of the versions those that the chained plugin speaks too: a
// runtime takes the newest of the list and asks no plugin. all is in order.
func (c Chained) restrict(all []string) (one string, left []string) {
	left = all[:slices.Index(all, c.Version)+1]
	if slices.Contains(left, usual) {
		return usual, left
	}
	return c.Version, left
}

// FindPortmap looks for the plugin in dir; nil: it is not there. It is not run:
// what was built for the host need not run in the agent's container. The version
// of the library that it was built with tells what it speaks.
func FindPortmap(dir string) (*Chained, error) {
	info, err := buildinfo.ReadFile(filepath.Join(dir, Portmap))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// A link leads to where the host has it, which the container need not have.
		if _, err := os.Lstat(filepath.Join(dir, Portmap)); err == nil {
			return &Chained{Version: usual}, nil
		}
		return nil, nil
	case errors.As(err, new(*fs.PathError)):
		return nil, fmt.Errorf("look at the portmap plugin: %w", err)
	case err != nil: // not Go's: nobody knows, and all speak this
		return &Chained{Version: usual}, nil
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == "github.com/containernetworking/cni" {
			return &Chained{Version: spokenBy(m.Version)}, nil
		}
	}
	return &Chained{Version: usual}, nil
}

// spokenBy is the newest version of the specification that a version of the
// library speaks.
func spokenBy(library string) string {
	major, rest, _ := strings.Cut(strings.TrimPrefix(library, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	switch {
	case err1 != nil || err2 != nil:
		return usual
	case a > 1 || a == 1 && b >= 2:
		return "1.1.0"
	case a == 1:
		return usual
	}
	return "0.4.0"
}

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
// first; a runtime that does not choose one uses usual.
var versions = []string{"0.4.0", usual, "1.1.0"}

const usual = "1.0.0"

// Chained is another plugin in the list, after ours.
type Chained struct {
	// Version is the newest of our list's versions that the plugin is known to
	// support.
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

// restrict returns the versions that the chained plugin supports too, since a
// runtime uses the newest of the list without asking the plugins, and the one for
// runtimes that do not choose. all is sorted, the oldest first.
func (c Chained) restrict(all []string) (one string, left []string) {
	left = all[:slices.Index(all, c.Version)+1]
	if slices.Contains(left, usual) {
		return usual, left
	}
	return c.Version, left
}

// FindPortmap looks for the plugin in dir; nil: it is not there. It is not run,
// since a program for the host need not run in the agent's container: the version
// of the CNI library in it tells which versions it supports.
func FindPortmap(dir string) (*Chained, error) {
	info, err := buildinfo.ReadFile(filepath.Join(dir, Portmap))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// A symbolic link to a place on the host that the container does not have.
		if _, err := os.Lstat(filepath.Join(dir, Portmap)); err == nil {
			return &Chained{Version: usual}, nil
		}
		return nil, nil
	case errors.As(err, new(*fs.PathError)):
		return nil, fmt.Errorf("look at the portmap plugin: %w", err)
	case err != nil: // not built by Go: every version supports the usual one
		return &Chained{Version: usual}, nil
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == "github.com/containernetworking/cni" {
			return &Chained{Version: supportedBy(m.Version)}, nil
		}
	}
	return &Chained{Version: usual}, nil
}

// supportedBy is the newest version of the specification that a version of the CNI
// library supports.
func supportedBy(library string) string {
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

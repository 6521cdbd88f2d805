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

// offered returns the versions that a list offers whose plugins support newest and older ones, since a runtime uses the newest of the list
// without asking the plugins, and the one for runtimes that do not choose.
func offered(newest string) (one string, all []string) {
	i := slices.Index(versions, newest)
	if i < 0 {
		return usual, versions
	}
	all = versions[:i+1]
	if slices.Contains(all, usual) {
		return usual, all
	}
	return newest, all
}

// Older returns the older of two versions of the CNI specification; an empty one is newer than any.
func Older(a, b string) string {
	if a == "" || b != "" && slices.Index(versions, b) < slices.Index(versions, a) {
		return b
	}
	return a
}

// NewestVersion returns the newest of our list's versions that a plugin in dir is known to support; empty: it is not there. It is not
// run, since a program for the host need not run in the agent's container: the version of the CNI library in it tells.
func NewestVersion(dir, plugin string) (string, error) {
	path := filepath.Join(dir, plugin)
	info, err := buildinfo.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// A symbolic link to a place on the host that the container does not have.
		if _, err := os.Lstat(path); err == nil {
			return usual, nil
		}
		return "", nil
	case errors.As(err, new(*fs.PathError)):
		return "", fmt.Errorf("look at the %s plugin: %w", plugin, err)
	case err != nil: // not built by Go: every version supports the usual one
		return usual, nil
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == "github.com/containernetworking/cni" {
			return supportedBy(m.Version), nil
		}
	}
	return usual, nil
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

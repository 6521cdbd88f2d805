package priv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Program is the path of a program: one that is installed, or Debian's, which tools/setup.sh has unpacked below the cache.
func Program(name string) (string, error) {
	path, missing := exec.LookPath(name)
	if missing == nil {
		return path, nil
	}
	dirs, err := Unpacked()
	if err != nil {
		return "", err
	}
	for _, dir := range dirs {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: %w; tools/setup.sh gets it", name, missing)
}

// Unpacked are the directories of such programs.
func Unpacked() ([]string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the cache: %w", err)
	}
	var dirs []string
	for _, dir := range []string{"usr/bin", "usr/sbin", "bin"} {
		dirs = append(dirs, filepath.Join(cache, "ebpf-cni/debian", dir))
	}
	return dirs, nil
}

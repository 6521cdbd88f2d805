package device

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// defaultProcSys is the directory of the kernel's sysctls.
const defaultProcSys = "/proc/sys"

// Sysctl reads and writes sysctls below a directory. The zero value uses defaultProcSys. Those under net/ are the
// ones of the calling thread's network namespace.
type Sysctl struct {
	Dir string
}

// Get reads a sysctl by its path below the directory, as in "net/ipv4/ip_forward".
func (s Sysctl) Get(name string) (string, error) {
	o, err := s.Open(name)
	if err != nil {
		return "", err
	}
	defer o.Close()
	return o.Get()
}

// Open opens a sysctl that is read often: to find its file costs more than to read it.
func (s Sysctl) Open(name string) (*OpenSysctl, error) {
	f, err := os.Open(s.path(name))
	if err != nil {
		return nil, fmt.Errorf("read sysctl: %w", err)
	}
	return &OpenSysctl{f}, nil
}

// OpenSysctl is a sysctl of the namespace in which it was opened.
type OpenSysctl struct{ file *os.File }

// Get reads the sysctl as it is now.
func (o *OpenSysctl) Get() (string, error) {
	// A read that is too small gets the beginning of a list, and the next one nothing.
	for size := 512; ; size *= 8 {
		b := make([]byte, size)
		n, err := o.file.ReadAt(b, 0)
		if err != nil && err != io.EOF {
			return "", fmt.Errorf("read sysctl: %w", err)
		}
		if n < size {
			return strings.TrimSpace(string(b[:n])), nil
		}
	}
}

// Close closes the sysctl's file; nil: it was not opened.
func (o *OpenSysctl) Close() {
	if o != nil {
		_ = o.file.Close()
	}
}

// Set writes a sysctl unless it has the value already, since many writes make the kernel notify or wait even when nothing
// changes. It reports whether it wrote.
func (s Sysctl) Set(name, value string) (bool, error) {
	if old, err := s.Get(name); err == nil && old == value {
		return false, nil
	}
	// No O_CREATE: where Dir is an ordinary directory, a missing sysctl must not become a file.
	f, err := os.OpenFile(s.path(name), os.O_WRONLY, 0)
	if err != nil {
		return false, fmt.Errorf("write sysctl: %w", err)
	}
	_, err = f.WriteString(value)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return false, fmt.Errorf("write sysctl %s = %s: %w", name, value, err)
	}
	return true, nil
}

func (s Sysctl) path(name string) string {
	dir := s.Dir
	if dir == "" {
		dir = defaultProcSys
	}
	return filepath.Join(dir, name)
}

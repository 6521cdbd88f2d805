package cni

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// ipamName is another ipam plugin, for the tests: it answers with the content of the file "answer" in its directory
// and adds each command that it gets to the file "commands". A file "refuse-ADD" is its error, "hang-ADD" has it hang; "conf-ADD" is what
// it was configured with.
const ipamName = "fake-ipam"

func runFakeIPAM() {
	dir := os.Getenv(fakeIPAM)
	verb := os.Getenv("CNI_COMMAND")
	conf, _ := io.ReadAll(os.Stdin)
	if verb == "VERSION" {
		fmt.Println(`{"cniVersion":"1.1.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}`)
		return
	}
	f, err := os.OpenFile(filepath.Join(dir, "commands"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		os.Exit(1)
	}
	fmt.Fprintln(f, verb, os.Getenv("CNI_CONTAINERID"), os.Getenv("CNI_IFNAME"))
	f.Close()
	if os.WriteFile(filepath.Join(dir, "conf-"+verb), conf, 0o600) != nil {
		os.Exit(1)
	}
	if _, err := os.Stat(filepath.Join(dir, "hang-"+verb)); err == nil {
		child := exec.Command("/bin/sleep", "10")
		child.Stdout = os.Stdout
		_ = child.Start()
		time.Sleep(10 * time.Second)
	}
	if refusal, err := os.ReadFile(filepath.Join(dir, "refuse-"+verb)); err == nil {
		_, _ = os.Stdout.Write(refusal)
		os.Exit(1)
	}
	if verb == "ADD" {
		answer, err := os.ReadFile(filepath.Join(dir, "answer"))
		if err != nil {
			os.Exit(1)
		}
		_, _ = os.Stdout.Write(answer)
	}
}

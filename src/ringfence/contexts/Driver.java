// Runs the cells of a Java context, one after the other, beside `kernel.py`; see `driven.py`.
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.Locale;
import jdk.jshell.*;

public class Driver {
    static final String IMPORTS = "import java.io.*; import java.math.*; import java.net.*; import java.nio.file.*;"
        + "import java.util.*; import java.util.concurrent.*; import java.util.function.*; import java.util.regex.*;"
        + "import java.util.stream.*;";
    static DataOutputStream tells;
    static volatile long added, begun, finished, interrupted;  // numbers of cells; the last: up to which
    static final JShell shell = JShell.builder().executionEngine("local").build();
    static final java.util.concurrent.BlockingQueue<String> cells = new java.util.concurrent.LinkedBlockingQueue<>();

    public static void main(String[] ends) throws Exception {
        tells = new DataOutputStream(new BufferedOutputStream(new FileOutputStream("/proc/self/fd/" + ends[1])));
        System.setOut(open(FileDescriptor.out));
        System.setErr(open(FileDescriptor.err));
        System.getenv().forEach((name, value) -> System.getProperties().putIfAbsent(name, value));
        run(IMPORTS);
        Thread reader = new Thread(() -> read(ends[0]));
        reader.setDaemon(true);
        reader.start();
        tell("done", "-", "");
        while (true) {
            String code = cells.take();
            begun++;
            try {
                run(code);
            } catch (Throwable error) {  // of the shell itself
                fail(error.getClass().getSimpleName(), String.valueOf(error.getMessage()), error.toString());
            }
            System.out.flush();
            System.err.flush();
            finished = begun;
            tell("done", "-", "");
        }
    }

    static PrintStream open(FileDescriptor end) {  // which a cell cannot close
        return new PrintStream(new FileOutputStream(end), true, StandardCharsets.UTF_8) {
            @Override public void close() {
                flush();
            }
        };
    }

    static void read(String end) {
        try (var asks = new DataInputStream(new FileInputStream("/proc/self/fd/" + end))) {
            while (true) {
                int size = asks.readInt();
                if (size < 0) {
                    interrupt(added);
                } else {
                    added++;
                    cells.add(new String(asks.readNBytes(size), StandardCharsets.UTF_8));
                }
            }
        } catch (IOException over) {
            Runtime.getRuntime().halt(0);
        }
    }

    /** Interrupts all cells up to that one. The shell ignores what comes while it compiles, so it is told until the end. */
    static void interrupt(long cell) {
        interrupted = cell;
        Thread stopper = new Thread(() -> {
            while (finished < cell) {
                shell.stop();
                try {
                    Thread.sleep(20);
                } catch (InterruptedException end) {
                    return;
                }
            }
        });
        stopper.setDaemon(true);
        stopper.start();
    }

    static boolean wasInterrupted() {
        return interrupted >= begun && begun > 0;
    }

    static void run(String code) throws IOException {
        var analysis = shell.sourceCodeAnalysis();
        for (String left = code; !left.isBlank() && !wasInterrupted(); ) {
            var found = analysis.analyzeCompletion(left);
            boolean isLast = found.remaining().isBlank();
            String source = found.completeness().isComplete() ? found.source() : left;
            for (SnippetEvent event : shell.eval(source)) {
                if (event.causeSnippet() == null && !tell(event, isLast)) return;
            }
            if (isLast || !found.completeness().isComplete()) break;
            left = found.remaining();
        }
        if (wasInterrupted()) fail("KeyboardInterrupt", "", "KeyboardInterrupt");
    }

    /** Tells what came of a snippet, and whether the next one may run. */
    static boolean tell(SnippetEvent event, boolean isLast) throws IOException {
        Snippet snippet = event.snippet();
        if (wasInterrupted()) return true;
        if (event.exception() instanceof EvalException error) {
            StringBuilder trace = new StringBuilder(error.getExceptionClassName() + ": " + error.getMessage());
            for (StackTraceElement each : error.getStackTrace()) trace.append("\n    at ").append(each);
            fail(error.getExceptionClassName(), String.valueOf(error.getMessage()), trace.toString());
            return false;
        }
        if (event.status() == Snippet.Status.REJECTED || event.exception() != null) {
            StringBuilder text = new StringBuilder();
            shell.diagnostics(snippet).forEach(each -> text.append(each.getMessage(Locale.ROOT)).append("\n"));
            if (snippet instanceof DeclarationSnippet declared)
                shell.unresolvedDependencies(declared).forEach(each -> text.append("cannot find ").append(each).append("\n"));
            fail("CompileError", text.toString().strip(), text + snippet.source().strip());
            return false;
        }
        boolean isValue = snippet.kind() == Snippet.Kind.EXPRESSION
            || snippet.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
        if (isLast && isValue && event.value() != null && !event.value().isEmpty()) {
            System.out.flush();
            tell("part", "text/plain", event.value());
            tell("main", "-", "");
        }
        return true;
    }

    static void fail(String name, String value, String trace) throws IOException {
        tell("part", "name", name);
        tell("part", "value", value);
        tell("part", "traceback", trace);
        tell("error", "-", "");
    }

    static void tell(String kind, String name, String text) throws IOException {
        byte[] data = text.getBytes(StandardCharsets.UTF_8);
        tells.write((kind + " " + name + " " + data.length + "\n").getBytes(StandardCharsets.US_ASCII));
        tells.write(data);
        tells.flush();
    }
}

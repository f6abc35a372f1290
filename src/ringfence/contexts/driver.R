# Runs the cells of an R context, one after the other, beside `kernel.py`; see `driven.py`.
(function() {
  ends <- commandArgs(TRUE)
  asks <- file(paste0("/proc/self/fd/", ends[1]), "rb", raw = TRUE)
  tells <- file(paste0("/proc/self/fd/", ends[2]), "wb", raw = TRUE)
  plots <- tempfile("plots")
  dir.create(plots)
  # A warning at once, not after the last cell.
  options(warn = 1, device = function(...) grDevices::png(file.path(plots, "%04d.png"), 640, 480))

  tell <- function(kind, data = raw(), name = "-") {
    if (is.character(data)) data <- charToRaw(enc2utf8(paste(data, collapse = "\n")))
    writeBin(c(charToRaw(sprintf("%s %s %d\n", kind, name, length(data))), data), tells)
    flush(tells)
  }
  show <- function(kind, value) {
    text <- utils::capture.output(if (isS4(value)) methods::show(value) else print(value))
    tell("part", text, "text/plain")
    tell(kind)
  }
  draw <- function() {
    grDevices::graphics.off()
    for (each in list.files(plots, full.names = TRUE)) {
      tell("part", readBin(each, "raw", file.size(each)), "image/png")
      tell("display")
      unlink(each)
    }
  }
  fail <- function(name, value, trace) {
    tell("part", name, "name")
    tell("part", value, "value")
    tell("part", trace, "traceback")
    tell("error")
  }
  run <- function(code) {
    expressions <- parse(text = code, keep.source = FALSE)
    for (at in seq_along(expressions)) {
      found <- withVisible(eval(expressions[[at]], globalenv()))
      if (found$visible) show(if (at == length(expressions)) "main" else "display", found$value)
    }
  }
  suspendInterrupts(repeat {
    size <- readBin(asks, "integer", 1, 4, endian = "big")
    if (!length(size)) quit("no")
    code <- rawToChar(readBin(asks, "raw", size))
    Encoding(code) <- "UTF-8"
    # What was meant for an earlier cell does not end this one.
    tryCatch(allowInterrupts(Sys.sleep(0)), interrupt = function(e) NULL)
    tell("begun")
    tryCatch(allowInterrupts(run(code)),
      error = function(e) fail("Error", conditionMessage(e), paste("Error:", conditionMessage(e))),
      interrupt = function(e) fail("KeyboardInterrupt", "", "KeyboardInterrupt"))
    tryCatch(draw(), error = function(e) message(conditionMessage(e)))
    tell("done")
  })
})()
